"""A real server and constraints over every transport: enforced, the same everywhere, or refused.

Speculation off on the same server is the reference. Cases of the public bug reports that concern
constraints and need a whole server stand here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import grpc
import httpx
import pytest
from jsonschema import Draft202012Validator

from spec_serve.api import messages as m
from spec_serve.client import SyncClient, SyncGrpcClient
from tests.api.tokens import TinyTokens
from tests.servers import TRANSPORTS, Got, Server, ask, from_status, refusal, start, strict
from tests.tiny import write_tiny_model_dir

TOKENS = TinyTokens()
PROMPT = "the other the other"
CHAT, TEXT, CLAUDE = "/v1/chat/completions", "/v1/completions", "/v1/messages"
ROOMY = ("--max-context", "1536")
SCHEMA = {
    "type": "object",
    "properties": {
        "ok": {"type": "boolean"},
        "kind": {"enum": ["red", "green", "blue"]},
        "sizes": {"type": "array", "items": {"type": "integer", "minimum": 0, "maximum": 99},
                  "minItems": 1, "maxItems": 3},
    },
    "required": ["ok", "kind", "sizes"],
    "additionalProperties": False,
}  # fmt: skip
VALID = Draft202012Validator(SCHEMA)
UNIQUE = {
    "type": "object",
    "properties": {"a": {"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True,
                         "minItems": 3, "maxItems": 3}},
    "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip


def fits_json(text: str) -> bool:
    return VALID.is_valid(strict(text))


KINDS: dict[str, tuple[dict[str, Any], Any]] = {
    "regex": (
        {"kind": "regex", "source": "[0-9]{4}-[0-9]{2}-[0-9]{2}"},
        re.compile("[0-9]{4}-[0-9]{2}-[0-9]{2}").fullmatch,
    ),
    "schema": ({"kind": "json_schema", "source": json.dumps(SCHEMA)}, fits_json),
    "compact": (
        {"kind": "json_schema", "source": json.dumps(SCHEMA), "whitespace": "compact"},
        lambda text: fits_json(text) and " " not in text and "\n" not in text,
    ),
    "choices": (
        {"kind": "choices", "source": '["yes", "no", "ä \\u20ac"]'},
        ("yes", "no", "ä \u20ac").__contains__,
    ),
    "lark": (
        {"kind": "lark", "source": 'start: "<" (start | "x") ">"'},
        re.compile("<+x>+").fullmatch,
    ),
    "name": ({"kind": "name", "source": "date"}, re.compile(r"\d{4}-\d\d-\d\d").fullmatch),
    "bounds": (
        {"kind": "text", "min_chars": 4, "max_chars": 9, "banned": ["e"]},
        lambda text: 4 <= len(text) <= 9 and "e" not in text,
    ),
}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_model_dir(
        tmp_path_factory.mktemp("tiny"), max_position_embeddings=2048
    )
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log, *ROOMY, "--kv-tokens", "6000", "--max-nodes", "4") as running:
        yield running
        running.wait_idle()
        said = log.read_text()
        assert running.process.poll() is None
    assert "Traceback" not in said and "rror" not in said, said


_off: dict[str, Got] = {}


def without(server: Server, **fields: Any) -> Got:
    """The answer without speculation, asked for once and whatever the transport."""
    key = f"{server.ws} {fields}"
    if key not in _off:
        _off[key] = ask(server, "grpc", **fields, mode="off")
        assert _off[key].drafted == 0
    return _off[key]


def post(server: Server, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(server.http + path, json=body, timeout=60, trust_env=False, verify=False)


def events(answer: httpx.Response) -> list[Any]:
    lines = [line for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [strict(line.removeprefix("data: ")) for line in lines if line != "data: [DONE]"]


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_constraint_holds_everywhere_and_speculation_changes_nothing(
    server: Server, transport: str, kind: str
) -> None:
    constraint, fits = KINDS[kind]
    for sampling in ({"temperature": 0}, {"temperature": 1.5, "seed": 5}):
        asked: dict[str, Any] = {
            "prompt": PROMPT, "max_tokens": 300, "constraint": constraint, "sampling": sampling
        }  # fmt: skip
        plain = without(server, **asked)
        got = ask(server, transport, **asked, mode="max")
        assert fits(got.text), got.text
        assert got.told[:2] == plain.told[:2] and got.reason == "stop"
        assert got.constraint is not None and got.constraint.complete
        assert not got.constraint.ignored
        assert got.constraint.schema_valid is (True if "schema" in constraint["kind"] else None)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_cut_short_is_told(server: Server, transport: str) -> None:
    constraint = {"kind": "json_schema", "source": json.dumps(SCHEMA)}
    got = ask(server, transport, prompt=PROMPT, max_tokens=4, constraint=constraint)
    assert (got.reason, got.counted) == ("length", 4)
    assert got.constraint is not None and not got.constraint.complete
    assert got.constraint.schema_valid is None


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_lenient_schema_names_what_it_ignored_and_says_whether_it_held(
    server: Server, transport: str
) -> None:
    constraint = {"kind": "json_schema", "source": json.dumps(UNIQUE), "strict": False}
    got = ask(server, transport, prompt=PROMPT, max_tokens=100, constraint=constraint)
    told = got.constraint
    # Three of two values can't be unique.
    assert told is not None and (told.complete, told.schema_valid) == (True, False)
    assert told.ignored == ["uniqueItems"]
    # A schema can't loosen itself.
    for source in (UNIQUE, {**UNIQUE, "x-guidance": {"lenient": True}}):
        code, field, said = refusal(
            server, transport, prompt=PROMPT,
            constraint={"kind": "json_schema", "source": json.dumps(source)},
        )  # fmt: skip
        assert (code, field) == ("invalid_request", "constraint") and "uniqueItems" in said


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(
    ("constraint", "more", "field"),
    [
        ({"kind": "regex", "source": "("}, {}, "constraint"),
        ({"kind": "json_schema", "source": "{"}, {}, "constraint"),
        ({"kind": "json_schema", "source": "[1]"}, {}, "constraint"),
        ({"kind": "lark", "source": "start: missing"}, {}, "constraint"),
        ({"kind": "name", "source": "klingon"}, {}, "constraint"),
        ({"kind": "choices", "source": "[]"}, {}, "constraint"),
        ({"kind": "text", "min_chars": 5, "max_chars": 4}, {}, "constraint.min_chars"),
        ({"kind": "json_object"}, {"ignore_eos": True}, "ignore_eos"),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(
    server: Server, transport: str, constraint: dict[str, Any], more: dict[str, Any], field: str
) -> None:
    code, named, said = refusal(server, transport, prompt=PROMPT, constraint=constraint, **more)
    wanted = f"stop.{field}" if (transport, field) == ("grpc", "ignore_eos") else field
    assert code == "invalid_request" and named in (field, wanted) and said.startswith(named)


def test_openais_forms_streamed_and_not(server: Server) -> None:
    turns = [{"role": "user", "content": "a"}]
    form = {"type": "json_schema", "json_schema": {"name": "r", "schema": SCHEMA, "strict": True}}
    for path, given in ((CHAT, {"messages": turns}), (TEXT, {"prompt": "a"})):
        body = {**given, "max_tokens": 400, "response_format": form, "n": 2, "temperature": 1}
        whole = post(server, path, body).json()
        for choice in whole["choices"]:
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert fits_json(text) and choice["finish_reason"] == "stop"
            assert choice["constraint"]["complete"] and choice["constraint"]["schema_valid"]
        chunks = events(post(server, path, {**body, "stream": True}))
        texts, told = ["", ""], []
        for chunk in chunks:
            for choice in chunk["choices"]:
                said = choice["delta"].get("content") if path == CHAT else choice["text"]
                texts[choice["index"]] += said or ""
                if choice["finish_reason"] is not None:
                    told.append(choice["constraint"]["complete"])
                else:
                    assert "constraint" not in choice
        assert told == [True, True] and all(map(fits_json, texts))
        loose = {**form, "json_schema": {"schema": UNIQUE}}
        (choice,) = post(server, path, {**body, "n": 1, "response_format": loose}).json()["choices"]
        assert choice["constraint"]["ignored"] == ["uniqueItems"]
        assert choice["constraint"]["schema_valid"] is False
        answer = post(server, path, {**body, "response_format": {
            **form, "json_schema": {"schema": UNIQUE, "strict": True}}})  # fmt: skip
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "response_format")
        assert "uniqueItems" in error["message"]
        for more in ({"guided_choice": ["yes", "no"]}, {"structured_outputs": {"regex": "yes|no"}}):
            (choice,) = post(server, path, {**given, **more}).json()["choices"]
            text = choice["message"]["content"] if path == CHAT else choice["text"]
            assert text in ("yes", "no")


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Bonn", "Kiel"]}, "days": {"enum": [1, 2]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
ARGUMENTS = Draft202012Validator(PARAMETERS)
NAMES = ("weather", "tide")


def tools(strict: bool) -> list[dict[str, Any]]:
    return [
        {"type": "function", "function": {"name": name, "parameters": PARAMETERS, "strict": strict}}
        for name in NAMES
    ]


@pytest.mark.parametrize("strict_tools", [True, False])
def test_tools_that_must_be_called_are(server: Server, strict_tools: bool) -> None:
    turns = [{"role": "user", "content": "a"}]
    named = {"type": "function", "function": {"name": "tide"}}
    for choice, parallel in (("required", False), (named, True)):
        body = {
            "messages": turns, "tools": tools(strict_tools), "tool_choice": choice,
            "parallel_tool_calls": parallel, "max_tokens": 300, "temperature": 1.2, "n": 2,
        }  # fmt: skip
        answer = post(server, CHAT, body)
        assert answer.status_code == 200, answer.text
        for one in answer.json()["choices"]:
            assert one["finish_reason"] == "tool_calls" and one["message"]["content"] is None
            (call,) = one["message"]["tool_calls"]
            assert call["function"]["name"] in (NAMES if choice == "required" else ("tide",))
            assert ARGUMENTS.is_valid(strict(call["function"]["arguments"]))
        written: dict[int, str] = {}
        for chunk in events(post(server, CHAT, {**body, "stream": True})):
            for one in chunk["choices"]:
                for piece in one["delta"].get("tool_calls", ()):
                    said = written.get(one["index"], "") + piece["function"]["arguments"]
                    written[one["index"]] = said
        assert [*map(ARGUMENTS.is_valid, map(strict, written.values()))] == [True, True]


def test_anthropics_tools_must_be_called_too(server: Server) -> None:
    given = [{"name": name, "input_schema": PARAMETERS} for name in NAMES]
    for choice, names in (({"type": "any"}, NAMES), ({"type": "tool", "name": "tide"}, ("tide",))):
        choice["disable_parallel_tool_use"] = True
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 300,
                "tools": given, "tool_choice": choice}  # fmt: skip
        answer = post(server, CLAUDE, body).json()
        (block,) = answer["content"]
        assert answer["stop_reason"] == "tool_use"
        assert block["name"] in names and ARGUMENTS.is_valid(block["input"])


def test_anthropics_output_format(server: Server) -> None:
    def said(schema: Any, **more: Any) -> httpx.Response:
        form = {"format": {"type": "json_schema", "schema": schema}}
        return post(server, CLAUDE, {
            "model": "tiny", "messages": [{"role": "user", "content": "a"}], "max_tokens": 400,
            "output_config": form, **more,
        })  # fmt: skip

    whole = said(SCHEMA).json()
    (block,) = whole["content"]
    assert fits_json(block["text"]) and whole["constraint"]["complete"]
    streamed = [strict(line.removeprefix("data: ")) for line in
                said(SCHEMA, stream=True).text.splitlines() if line.startswith("data: ")]
    (ending,) = [one["delta"] for one in streamed if one["type"] == "message_delta"]
    assert ending["constraint"] == whole["constraint"]
    for answer in (said(UNIQUE), said(SCHEMA, constraint={"kind": "json_object"})):
        assert answer.status_code == 400
    assert "output_config.format: " in said(UNIQUE).json()["error"]["message"]
    short = said(SCHEMA, output_config=None, constraint={"kind": "choices", "source": '["yes"]'})
    assert short.json()["content"][0]["text"] == "yes"


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_clients_pass_constraints_and_tools_on(server: Server, transport: str) -> None:
    made = SyncClient(server.ws) if transport == "socket" else SyncGrpcClient(server.grpc)
    with made as client:
        answer = client.complete(
            PROMPT, max_tokens=300, constraint={"kind": "json_schema", "source": json.dumps(SCHEMA)}
        )
        assert fits_json(answer.text)
        assert answer.constraint == m.Constrained(True, [], True, answer.constraint.forced)
        assert answer.constraint.forced > 0
        answer = client.chat(
            "a", max_tokens=300, tools=tools(True), tool_choice={"name": "tide"}
        )
        head, _, rest = answer.text.partition('"arguments": ')
        assert head == '<tool_call>\n{"name": "tide", '
        assert ARGUMENTS.is_valid(strict(rest.removesuffix("}\n</tool_call>")))
        answer = client.chat(
            "a", max_tokens=300, tools=tools(True), tool_choice="required",
            parallel_tool_calls=False,
        )  # fmt: skip
        assert answer.text.count("<tool_call>") == 1 and answer.constraint is not None


def test_case_17_gateways_constraints_are_enforced(server: Server) -> None:
    """vLLM's proto: each kind it has, streamed and not; what can't be is refused by name."""
    vllm = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2")
    calls = pytest.importorskip("smg_grpc_proto.generated.vllm_engine_pb2_grpc")
    lark, lark_fits = KINDS["lark"]
    kinds: list[tuple[dict[str, Any], Any]] = [
        ({"regex": "[0-9]{4}"}, re.compile("[0-9]{4}").fullmatch),
        ({"json_schema": json.dumps(SCHEMA)}, fits_json),
        ({"grammar": lark["source"]}, lark_fits),
        ({"choice": vllm.ChoiceConstraint(choices=["yes", "no"])}, ("yes", "no").__contains__),
        ({"json_object": True}, lambda text: text.startswith("{")),
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        stub = calls.VllmEngineStub(channel)

        def said(stream: bool, **constraint: Any) -> str:
            sampling = vllm.SamplingParams(max_tokens=300, **constraint)
            request = vllm.GenerateRequest(text=PROMPT, sampling_params=sampling, stream=stream)
            *_, last = stub.Generate(request, timeout=30)
            return TOKENS.decode(last.complete.output_ids)

        for stream in (False, True):
            for constraint, fits in kinds:
                assert fits(said(stream, **constraint)), constraint
        refused: list[dict[str, Any]] = [
            {"regex": "("}, {"json_schema": json.dumps(UNIQUE)}, {"grammar": "root ::= a"},
            {"structural_tag": "{}"}, {"choice": vllm.ChoiceConstraint()},
        ]  # fmt: skip
        for constraint in refused:
            with pytest.raises(grpc.RpcError) as caught:
                said(False, **constraint)
            code, field, told = from_status(caught.value)
            assert (code, field) == ("invalid_request", f"sampling_params.{next(iter(constraint))}")
            assert told.startswith(field)
