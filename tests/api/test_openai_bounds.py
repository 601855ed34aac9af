"""Every field of OpenAI's requests with every value that breaks servers: refused by name or served.

No socket and no engine's thread: bodies go through the decoder, the translation, the tokenizer and
the engine's own checks, as in the server. Knows no answers.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter
from typing import Any

import msgspec
import pytest

from spec_serve.api import openai_convert, openai_wire
from spec_serve.api.calls import Call, HttpError
from spec_serve.api.convert import to_request
from spec_serve.api.generation import failure
from spec_serve.spec.request import RequestError
from tests.api.echo import ByteTokens, Echo

ENGINE, TOKENS = Echo(), ByteTokens()
CHAT, TEXT = openai_wire.ChatRequest, openai_wire.CompletionRequest
SMALL = {
    CHAT: {"messages": '[{"role": "user", "content": "a"}]'},
    TEXT: {"prompt": '"a"'},
}
# As they stand in a body: JSON has no NaN, but clients send it.
NUMBERS = [
    "-1", "0", "1", "2", "0.5", "-0.0", "1e-320", "1e308", "1e999", "-1e999", "NaN", "Infinity",
    "-Infinity", str(2**31), str(-(2**31) - 1), str(2**32), str(2**63 - 1), str(2**63),
    str(-(2**63)), str(2**64), "1" + "0" * 4300, "1e1000000",
]  # fmt: skip
STRINGS = [
    '""', '"a"', '"auto"', '"none"', '"required"', r'"\u0000\u0001\u001b"', r'"\ud800"',
    r'"\udfff"', '"<|im_start|>system"', json.dumps("x" * 300), json.dumps("x" * (1 << 20)),
    r'"\uffff"', json.dumps("😀" * 70), '"../../etc/passwd"',
]  # fmt: skip
OTHERS = [
    "null", "true", "false", "[]", "{}", "[null]", "[[]]", '[""]', "[-1]", "[0]", f"[{2**63}]",
    '["a", 1]', '{"": 0}', '{"0": 1}', '{"-1": 1}', '{"999": 1}', '{"1e3": NaN}',
    '{"type": "text"}', '{"type": "json_schema"}', '{"type": "content", "content": "x"}',
    '{"mode": "max"}', '{"mode": 1}', '{"max_nodes": -1}', '{"sources": ["x"]}',
    '{"include_usage": true}',
    "[" * 2000 + "]" * 2000, '{"a":' * 2000 + "0" + "}" * 2000, '[{"type": "function"}]',
    '[{"type": "function", "function": {"name": "f", "parameters": {"$ref": "#"}}}]',
    '[{"role": "user", "content": null}]', '[{"role": "user", "content": [{"type": "text"}]}]',
    '[{"role": "tool", "content": "x", "tool_call_id": "' + "9" * 5000 + '"}]',
    "[" + "1," * 1024 + "1]", "[" + '"ab",' * 64 + '"ab"]',
]  # fmt: skip
VALUES = NUMBERS + STRINGS + OTHERS


NAMES = (r"\ud800", r"\u0000", "x" * (1 << 20), "__class__", "", r"a\"b`c", "😀", "$.x", "n[0]")


def call(body: bytes) -> Call:
    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": body}

    async def send(event: Any) -> None:
        raise AssertionError

    scope = {"type": "http", "path": "/", "method": "POST", "headers": [], "query_string": b""}
    return Call(scope, receive, send)


async def judged(kind: Any, fields: dict[str, str]) -> HttpError | None:
    """What a body with these fields gets, a short answer in any case; None if it is served."""
    error = await refusal(kind, fields)
    if error is not None:
        assert len(msgspec.json.encode(error.body())) < 1500, error.message[:2000]
        assert error.status in (400, 404), (fields, error.message)
    return error


async def refusal(kind: Any, fields: dict[str, str]) -> HttpError | None:
    body = "{" + ", ".join(f'"{name}": {value}' for name, value in fields.items()) + "}"
    try:
        request = await call(body.encode()).json(kind)
        translate: Any = openai_convert.chat if kind is CHAT else openai_convert.completions
        asked = translate(request)
        for wire in asked.wires:
            try:
                ENGINE.validate(to_request(wire, TOKENS, models=("echo",)).request)
            except RequestError as error:
                return asked.error(failure(error, wire=wire))
    except HttpError as error:
        return error
    return None


@pytest.mark.parametrize("kind", [CHAT, TEXT])
def test_every_field_with_every_value(kind: Any) -> None:
    async def go() -> None:
        met: Counter[bool] = Counter()
        for name in (*kind.__struct_fields__, "unknown"):
            for value in VALUES:
                error = await judged(kind, SMALL[kind] | {name: value})
                met[error is None] += 1
                if error is None:
                    continue
                # The text of a body that is no JSON names no field; everything else does.
                if error.param is not None:
                    known = error.param.partition(".")[0].partition("[")[0]
                    assert known in (*kind.__struct_fields__, "unknown"), (name, value, error.param)
        assert met[True] > 200 and met[False] > 2000, met

    asyncio.run(go())


def test_fields_together() -> None:
    """Sixty thousand bodies of a few fields at once, the same in every run."""
    chance = random.Random(0)
    light = [value for value in VALUES if len(value) < 400]

    async def go() -> None:
        served = 0
        for _ in range(60_000):
            kind = chance.choice((CHAT, TEXT))
            names = chance.sample(kind.__struct_fields__, chance.randint(1, 4))
            fields = SMALL[kind] | {name: chance.choice(light) for name in names}
            error = await judged(kind, fields)
            served += error is None
        assert served > 1000

    asyncio.run(go())


@pytest.mark.parametrize("name", NAMES, ids=range(len(NAMES)))
def test_names_of_fields(name: str) -> None:
    error = asyncio.run(judged(CHAT, SMALL[CHAT] | {name: "1"}))
    assert error is not None and error.code == "invalid_request"


@pytest.mark.parametrize(
    "body", [b"", b"null", b"[]", b"1", b"{", b"\xff\xfe", b'{"messages": ' + b"[" * 100_000, b"\0"]
)
def test_bodies_that_are_no_request(body: bytes) -> None:
    with pytest.raises(HttpError) as told:
        asyncio.run(call(body).json(CHAT))
    assert told.value.status == 400
