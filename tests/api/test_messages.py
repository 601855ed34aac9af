"""WebSocket messages: both codecs, bounds, and errors that name the field.

The bounds are those an attacker tries: counts, sizes, NaN, nesting, numbers beyond 64 bits.
"""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest

from spec_serve.api import messages as m

CODECS = [m.Codec(m.JSON), m.Codec(m.MSGPACK)]


@pytest.fixture(params=CODECS, ids=["json", "msgpack"])
def codec(request: pytest.FixtureRequest) -> m.Codec:
    made: m.Codec = request.param
    return made


def frame(codec: m.Codec, **values: Any) -> bytes:
    """A generate message as a client of another make could send it."""
    return codec.encode({"type": "generate", "gen": "a", "prompt": "x", **values})


def test_a_message_survives_the_trip(codec: m.Codec) -> None:
    sent = m.Generate(
        "a.b:c-1",
        messages=[m.ChatMessage("user", "\u6f22\U0001f600")],
        sampling=m.Sampling(temperature=0.5, seed=2**63 - 1, logit_bias={"7": -100.0}),
        stop=["\n\n"],
        speculation=m.Speculation("max", 3, ["lookup"], "guess"),
        logprobs=0,
    )
    assert codec.client_message(codec.encode(sent)) == sent
    said = m.Delta("a", 4, 1, "\u00e9", [1, 2], [m.Logprob(1, -0.5, "x", [(1, -0.5, "x")])], [
        m.Step(0, 3, 1, {"lookup": (3, 1)}, 5, 6, 7, [9], [-1], ["y"])
    ])  # fmt: skip
    assert codec.server_message(codec.encode(said)) == said


def test_absent_fields_stay_absent(codec: m.Codec) -> None:
    made = codec.client_message(frame(codec))
    assert isinstance(made, m.Generate)
    assert made.sampling == m.Sampling() and made.sampling.temperature is None
    assert made.max_tokens is None and made.logprobs is None and made.timeout_s is None


WRONG: list[tuple[str, dict[str, Any]]] = [
    ("sampling.n", {"sampling": {"n": 9}}),
    ("sampling.n", {"sampling": {"n": 0}}),
    ("sampling.n", {"sampling": {"n": 1_000_000}}),
    ("sampling.temperature", {"sampling": {"temperature": -0.1}}),
    ("sampling.temperature", {"sampling": {"temperature": "hot"}}),
    ("sampling.top_p", {"sampling": {"top_p": 0}}),
    ("sampling.top_k", {"sampling": {"top_k": -1}}),
    ("sampling.min_p", {"sampling": {"min_p": 1.5}}),
    ("sampling.seed", {"sampling": {"seed": 2**63}}),
    ("sampling.seed", {"sampling": {"seed": -1}}),
    ("sampling.repetition_penalty", {"sampling": {"repetition_penalty": 0}}),
    ("sampling.presence_penalty", {"sampling": {"presence_penalty": 3}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {str(i): 1.0 for i in range(1025)}}}),
    ("sampling.logit_bias", {"sampling": {"logit_bias": {"1": 1000.0}}}),
    ("sampling.bogus", {"sampling": {"bogus": 1}}),
    ("bogus", {"bogus": 1}),
    ("logprobs", {"logprobs": 21}),
    ("logprobs", {"logprobs": -1}),
    ("logprobs", {"logprobs": True}),
    ("prompt_logprobs", {"prompt_logprobs": 2**31}),
    ("max_tokens", {"max_tokens": 0}),
    ("max_tokens", {"max_tokens": -1}),
    ("max_tokens", {"max_tokens": 1.5}),
    ("min_tokens", {"min_tokens": -1}),
    ("stop", {"stop": ["x"] * 17}),
    ("stop", {"stop": "x"}),
    ("stop", {"stop": [""]}),
    ("stop", {"stop": ["", "x"]}),
    ("stop", {"stop": ["x" * 257]}),
    ("stop_token_ids", {"stop_token_ids": [-2]}),
    ("stop_token_ids", {"stop_token_ids": [1] * 1025}),
    ("token_ids", {"token_ids": [-1]}),
    ("token_ids", {"token_ids": [3, "x"]}),
    ("token_ids", {"token_ids": [2**32]}),
    ("speculation.mode", {"speculation": {"mode": "medusa"}}),
    ("speculation.max_nodes", {"speculation": {"max_nodes": 2**31}}),
    ("messages", {"messages": []}),
    ("messages[0].role", {"messages": [{"role": "robot", "content": "x"}]}),
    ("messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    ("priority", {"priority": 101}),
    ("cache_salt", {"cache_salt": "s" * 257}),
    ("timeout_s", {"timeout_s": 0}),
    ("gen", {"gen": ""}),
    ("gen", {"gen": "a b"}),
    ("gen", {"gen": "g" * 65}),
    ("steps", {"steps": "all"}),
]


@pytest.mark.parametrize(("field", "values"), WRONG)
def test_a_wrong_field_is_named(codec: m.Codec, field: str, values: dict[str, Any]) -> None:
    with pytest.raises(m.BadMessage) as caught:
        codec.client_message(frame(codec, **values))
    assert caught.value.field.startswith(field)
    assert field.split(".")[-1] in str(caught.value)


FLOATS = (
    "temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
)  # fmt: skip


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", FLOATS)
def test_what_is_not_finite_is_refused_by_name(name: str, value: float) -> None:
    codec = CODECS[1]  # JSON has no such numbers
    with pytest.raises(m.BadMessage) as caught:
        codec.client_message(frame(codec, sampling={name: value}))
    assert caught.value.field == f"sampling.{name}"
    with pytest.raises(m.BadMessage):
        codec.client_message(frame(codec, sampling={"logit_bias": {"3": value}}))
    with pytest.raises(m.BadMessage):
        codec.client_message(codec.encode({"type": "ping", "t": value}))
    with pytest.raises(m.BadMessage):
        codec.client_message(frame(codec, timeout_s=value))


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "9" * 5000])
def test_json_numbers_beyond_numbers_are_refused(number: str) -> None:
    text = '{"type":"generate","gen":"a","prompt":"x","sampling":{"temperature":' + number + "}}"
    with pytest.raises(m.BadMessage):
        CODECS[0].client_message(text)


def test_nesting_is_refused_and_not_a_crash(codec: m.Codec) -> None:
    depth = 100_000
    if codec.text:
        deep = b'{"type":"generate","gen":"a","tools":[{"x":' + b"[" * depth + b"]" * depth + b"}]}"
    else:
        head = msgspec.msgpack.encode({"type": "generate", "gen": "a"})
        deep = bytes([head[0] + 1]) + head[1:] + msgspec.msgpack.encode("tools")
        deep += b"\x91\x81\xa1x" + b"\x91" * depth + b"\xc0"
    with pytest.raises(m.BadMessage):
        codec.client_message(deep)


RUBBISH = [b"", b"{", b"\xff\xfe", b"[]", b"null", b'{"type":"nothing"}', b'{"gen":"a"}']


@pytest.mark.parametrize("data", RUBBISH)
def test_rubbish_is_refused(codec: m.Codec, data: bytes) -> None:
    with pytest.raises(m.BadMessage):
        codec.client_message(data)
    assert codec.peek_gen(data) in (None, "a")


def test_a_msgpack_length_that_lies_allocates_nothing() -> None:
    with pytest.raises(m.BadMessage):
        CODECS[1].client_message(b"\xdd\xff\xff\xff\xff")


def test_the_gen_of_a_wrong_message_can_still_be_read(codec: m.Codec) -> None:
    wrong = frame(codec, sampling={"n": 99})
    assert codec.peek_gen(wrong) == "a"
    assert codec.peek_gen(codec.encode({"gen": "not an id"})) is None


def test_plain_values_are_checked_like_those_of_the_wire() -> None:
    made = m.generate({"type": "generate", "gen": "a", "prompt": "x", "max_tokens": 4})
    assert made == m.Generate("a", prompt="x", max_tokens=4)
    with pytest.raises(m.BadMessage) as caught:
        m.generate({"type": "generate", "gen": "a", "sampling": {"top_p": math.nan}})
    assert caught.value.field == "sampling.top_p"


def test_only_known_codecs() -> None:
    with pytest.raises(ValueError, match="codec"):
        m.Codec("specserve.v9")
