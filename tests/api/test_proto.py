"""The committed modules are what the proto file says, and both transports offer the same."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import descriptor_pb2

from spec_serve.api import messages as m
from spec_serve.api.grpc_convert import STATUS, generate, proto_field
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.client.rpc_convert import to_proto

ROOT = Path(__file__).resolve().parents[2]
PROTO = "spec_serve/api/proto/specserve.proto"


def test_the_generated_modules_are_up_to_date(tmp_path: Path) -> None:
    protoc = pytest.importorskip("grpc_tools.protoc")
    out = tmp_path / "set"
    arguments = ["protoc", f"-I{ROOT / '.typing'}", f"--descriptor_set_out={out}", PROTO]
    assert protoc.main(arguments) == 0
    (wanted,) = descriptor_pb2.FileDescriptorSet.FromString(out.read_bytes()).file
    held = descriptor_pb2.FileDescriptorProto()
    pb.DESCRIPTOR.CopyToProto(held)
    wanted.ClearField("source_code_info")
    for message in (wanted, held):
        _without_json_names(message)
    assert held == wanted
    stub = importlib.import_module("spec_serve.api.proto.specserve_pb2_grpc")
    servicer = stub.SpecServeServicer
    for method in wanted.service[0].method:
        assert hasattr(servicer, method.name)


def _without_json_names(file: descriptor_pb2.FileDescriptorProto) -> None:
    """protoc writes them out, the runtime derives them."""
    waiting = list(file.message_type)
    while waiting:
        message = waiting.pop()
        waiting += message.nested_type
        for field in message.field:
            field.ClearField("json_name")


def test_every_error_code_has_a_status() -> None:
    codes = m.Code.__args__  # type: ignore[attr-defined]
    assert set(STATUS) == set(codes)


def test_every_sampling_field_is_in_both() -> None:
    assert set(m.Sampling.__struct_fields__) == set(pb.Sampling.DESCRIPTOR.fields_by_name)


@pytest.mark.parametrize(
    ("wire", "proto"),
    [
        ("stop[2]", "stop.strings[2]"),
        ("messages[0].content[1]", "chat.messages[0].content[1]"),
        ("sampling.logit_bias[7]", "sampling.logit_bias[7]"),
        ("max_tokens", "stop.max_tokens"),
        ("prompt", "prompt"),
        ("tools[0].function.strict", "chat.tools_json[0].function.strict"),
        ("constraint.max_chars", "constraint.max_chars"),
        ("constraint.source", "constraint"),
    ],
)
def test_fields_are_named_as_the_proto_names_them(wire: str, proto: str) -> None:
    assert proto_field(wire) == proto


@pytest.mark.parametrize(
    "fields",
    [
        *({"constraint": {"kind": kind, "source": "a"}}
          for kind in ("regex", "json_schema", "lark", "name")),
        {"constraint": {"kind": "text", "max_chars": 9, "min_chars": 2, "max_words": 3,
                        "max_sentences": 1, "banned": ["x", "ä"], "after": "</think>"}},
        {"constraint": {"kind": "json_object", "whitespace": "compact", "forcing": False}},
        {"constraint": {"kind": "json_schema", "source": "{}", "whitespace": "any",
                        "strict": False}},
        {"constraint": {"kind": "choices", "source": '["a","ä \\""]'}},
        {"tool_choice": "required"},
        {"tool_choice": {"name": "f"}, "parallel_tool_calls": False},
    ],
)  # fmt: skip
def test_a_constraint_arrives_as_it_was_sent(fields: dict[str, Any]) -> None:
    turns = [{"role": "user", "content": "a"}]
    sent = m.generate({"gen": "call", "messages": turns, "tools": [{}], **fields})
    got = generate(pb.GenerateRequest.FromString(to_proto(sent).SerializeToString()))
    for name in ("constraint", "tool_choice", "parallel_tool_calls"):
        assert getattr(got, name) == getattr(sent, name)


def test_a_constraint_needs_a_kind() -> None:
    for made in (pb.Constraint(), pb.Constraint(json_object=False), pb.Constraint(text=False)):
        with pytest.raises(m.BadMessage, match="^constraint"):
            generate(pb.GenerateRequest(prompt="a", constraint=made))
