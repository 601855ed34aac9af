"""Tens of thousands of wrong requests: each refused with a reason or fit for the engine, no third.

In process and without an engine that computes; storms over sockets are in test_bad_input_live.py.
"""

from __future__ import annotations

import collections
import json
import random
from typing import Any

import msgspec
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from spec_serve.api import grpc_convert
from spec_serve.api import messages as m
from spec_serve.api.convert import to_request
from spec_serve.api.generation import failure
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.spec.admission import Limits, check_request
from spec_serve.spec.request import RequestError
from spec_serve.spec.row import make_rows
from tests.api.echo import ByteTokens, Echo
from tests.api.nasty import FIELDS, NUMBERS, OTHERS, TEXTS, mutated, requests, with_field

INFO = Echo(context=512).info
TOKENS = ByteTokens()
JSON, MSGPACK = m.Codec(m.JSON), m.Codec(m.MSGPACK)


def outcome(wire: m.Generate) -> str:
    """What becomes of a request whose form is right: "served", or why it is refused."""
    try:
        request = to_request(wire, TOKENS, models=("echo",)).request
        check_request(request, INFO, Limits())
        make_rows(request, INFO, 0.0, 0)
    except RequestError as error:
        told = failure(error, wire.gen, wire)
        assert told.code in ("invalid_request", "context_length_exceeded", "model_not_found")
        assert told.param and told.message and len(told.message) < 600
        return told.code
    assert 1 <= len(request.prompt) < INFO.max_context and 1 <= request.n <= 8
    return "served"


def tried(decode: Any, *arguments: Any) -> str:
    """The same for values or bytes: BadMessage is the only other way."""
    try:
        message = decode(*arguments)
    except m.BadMessage as error:
        assert str(error)
        return "bad"
    return outcome(message) if isinstance(message, m.Generate) else "other"


def test_every_field_with_every_nasty_value() -> None:
    seen: collections.Counter[str] = collections.Counter()
    for made in requests(30_000):
        seen[tried(m.generate, made)] += 1
    assert sum(seen.values()) > 33_000
    assert seen["bad"] > 20_000 and seen["served"] > 1000, seen
    assert seen["invalid_request"] > 200, seen
    assert seen["context_length_exceeded"] and seen["model_not_found"], seen


def test_the_same_over_the_wire() -> None:
    seen: collections.Counter[str] = collections.Counter()
    for made in requests(4000, seed=1):
        values = {"type": "generate", **made}
        try:
            packed = MSGPACK.encode(values)
        except (OverflowError, UnicodeEncodeError, ValueError):
            packed = b""  # what MessagePack can't say
        as_json = json.dumps(values)  # NaN and half surrogates included
        for codec, frame in ((JSON, as_json), (JSON, as_json.encode()), (MSGPACK, packed)):
            seen[tried(codec.client_message, frame)] += 1
            gen = codec.peek_gen(frame)
            assert gen is None or 1 <= len(gen) <= 64
    assert sum(seen.values()) > 15_000 and seen["served"] > 1000, seen


def test_tools_of_every_wrong_shape() -> None:
    chance = random.Random(5)
    odd: list[Any] = [*OTHERS, *NUMBERS[:20], *TEXTS[:20]]
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(3000):
        schema: Any = {"type": chance.choice(["object", "string", 7, None, "\x00", ["null", 7]])}
        for key in ("pattern", "properties", "items", "$ref", "enum", "required", "anyOf"):
            if chance.random() < 0.3:
                schema[key] = chance.choice([*odd, "(a+)+$", "[", "#/", {"$ref": "#"}])
        function = {"name": chance.choice(["f", *TEXTS[:20], 7]), "parameters": schema}
        tool = {"type": chance.choice(["function", "function", "file", 7]), "function": function}
        tools = [chance.choice([tool, tool, tool, *odd]) for _ in range(chance.randint(0, 3))]
        made = {"gen": "g", "messages": [{"role": "user", "content": "hi"}], "tools": tools}
        seen[tried(m.generate, made)] += 1
    assert min(seen["bad"], seen["served"], seen["invalid_request"]) > 100, seen


BOUNDED = {
    "sampling.n": (1, 8), "sampling.top_k": (0, 10**6), "sampling.seed": (0, 2**63 - 1),
    "max_tokens": (1, 2**63 - 1), "min_tokens": (0, 2**63 - 1), "logprobs": (0, 20),
    "prompt_logprobs": (0, 20), "priority": (-100, 100), "speculation.max_nodes": (0, 1024),
    "sampling.temperature": (0, 2), "sampling.top_p": (1e-320, 1), "sampling.min_p": (0, 1),
    "sampling.presence_penalty": (-2, 2), "sampling.frequency_penalty": (-2, 2),
    "sampling.repetition_penalty": (1e-320, 10), "timeout_s": (1e-320, 86_400),
}  # fmt: skip


@pytest.mark.parametrize("field", BOUNDED)
def test_a_number_has_bounds_and_the_error_names_its_field(field: str) -> None:
    low, high = BOUNDED[field]
    assert field in FIELDS
    for value in NUMBERS:
        whole = isinstance(low, int) and isinstance(high, int) and "_p" not in field
        fits = low <= value <= high
        try:
            made = m.generate(with_field({"gen": "g", "prompt": "x"}, field, value))
        except m.BadMessage as error:
            assert error.field == field
            whole_numbers = "temperature" not in field and "penalty" not in field
            if fits and not (whole and whole_numbers and isinstance(value, float)):
                raise AssertionError(f"{value} was refused") from error
            continue
        assert fits, value
        assert tried(lambda made=made: made) in ("served", "invalid_request")


PLAIN: list[dict[str, Any]] = [
    {
        "type": "generate", "gen": "g", "prompt": "hello", "max_tokens": 3, "stop": ["a", "b"],
        "sampling": {"temperature": 0.5, "seed": 7, "n": 2, "logit_bias": {"1": 2.0}},
        "speculation": {"mode": "max", "prediction": "x"}, "logprobs": 3, "ids": True,
    },
    {"type": "generate", "gen": "h", "messages": [{"role": "user", "content": "hi"}]},
    {"type": "cancel", "gen": "g"}, {"type": "ping", "t": 1.5},
    {"type": "ack", "gen": "g", "seq": 1},
    {"type": "resume", "resume_token": "abc", "gens": {"g": 3}}, {"type": "auth", "api_key": "k"},
]  # fmt: skip


@pytest.mark.parametrize("codec", [JSON, MSGPACK], ids=lambda codec: codec.name)
def test_mutated_frames(codec: m.Codec) -> None:
    chance = random.Random(3)
    frames = [codec.encode(values) for values in PLAIN]
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(30_000):
        frame: bytes | str = mutated(chance, chance.choice(frames))
        if codec.text:  # a text frame has been decoded before it comes here
            frame = frame.decode("utf-8", "replace")  # type: ignore[union-attr]
        seen[tried(codec.client_message, frame)] += 1
        codec.peek_gen(frame)
    assert seen["bad"] > 10_000 and min(seen["other"], seen["served"]) > 100, seen


@hypothesis_settings(max_examples=1500)
@given(st.binary(max_size=300))
def test_any_bytes(data: bytes) -> None:
    for codec in (JSON, MSGPACK):
        tried(codec.client_message, data)
        codec.peek_gen(data)
    tried(JSON.client_message, data.decode("latin-1"))


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=12,
)


@hypothesis_settings(max_examples=700)
@given(st.sampled_from(FIELDS), values)
def test_any_value_in_any_field(field: str, value: Any) -> None:
    made = with_field({"gen": "g", "prompt": "hello"}, field, value)
    tried(m.generate, made)
    tried(JSON.client_message, json.dumps({"type": "generate", **made}))


@pytest.mark.parametrize("depth", [100, 1000, 5000, 200_000])
def test_nesting_without_end(depth: int) -> None:
    frames: list[tuple[m.Codec, bytes]] = [
        (JSON, b'{"type":"generate","gen":"g","messages":[{"role":"user","content":[{"a":'
         + b"[" * depth + b"]" * depth + b"}]}]}"),
        (JSON, b"[" * depth), (JSON, b'{"a":' * depth),
        (JSON, b'{"type":"generate","gen":"g","tools":[{"a":' + b'{"a":' * depth),
        (MSGPACK, b"\x91" * depth), (MSGPACK, b"\x81\xa1a" * depth),
        (MSGPACK, msgspec.msgpack.encode({"type": "generate", "gen": "g"})[:-1] + b"\x91" * depth),
    ]  # fmt: skip
    for codec, frame in frames:
        assert tried(codec.client_message, frame) in ("bad", "invalid_request")
        codec.peek_gen(frame)


def test_lengths_that_lie_cost_nothing() -> None:
    for head in (b"\xdd", b"\xdf", b"\xdb", b"\xc6"):  # arrays, maps, texts, bytes of 4 Gi
        assert tried(MSGPACK.client_message, head + b"\xff\xff\xff\xff" + b"a" * 20) == "bad"
    assert tried(JSON.client_message, b'{"type":"ping","t":' + b"9" * 100_000 + b"}") == "bad"


FULL = pb.GenerateRequest(
    request_id="r", prompt="hello", priority=3, cache_salt="s", model="echo",
    sampling=pb.Sampling(temperature=0.5, seed=7, n=2, top_k=5, logit_bias={1: 2.0}),
    stop=pb.Stop(max_tokens=3, strings=["a"], token_ids=[1, 2]),
    output=pb.Output(token_ids=True, logprobs=3),
    speculation=pb.Speculation(mode=pb.Speculation.MAX, prediction="x"),
)  # fmt: skip


def test_mutated_protobufs() -> None:
    chance = random.Random(4)
    chat = pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="user", content="hi")]))
    frames = [FULL.SerializeToString(), chat.SerializeToString()]
    seen: collections.Counter[str] = collections.Counter()
    for _ in range(25_000):
        try:
            request = pb.GenerateRequest.FromString(mutated(chance, chance.choice(frames)))
        except DecodeError:
            seen["garbage"] += 1
            continue
        seen[tried(grpc_convert.generate, request)] += 1
    assert min(seen["garbage"], seen["bad"], seen["served"]) > 100, seen


NUMERIC = (
    ("sampling", pb.Sampling), ("stop", pb.Stop), ("output", pb.Output),
    ("speculation", pb.Speculation),
)  # fmt: skip


def test_every_number_of_the_protobuf() -> None:
    count = 0
    for name, kind in (("", pb.GenerateRequest), *NUMERIC):
        for field in kind.DESCRIPTOR.fields:
            if field.message_type is not None or field.is_repeated:
                continue
            for value in NUMBERS:
                request = pb.GenerateRequest(prompt="hello")
                try:
                    setattr(getattr(request, name) if name else request, field.name, value)
                except (TypeError, ValueError, OverflowError):
                    continue  # what protobuf itself can't hold
                assert tried(grpc_convert.generate, request) in ("bad", "served", "invalid_request")
                count += 1
    assert count > 300
