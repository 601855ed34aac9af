"""From the wire to the engine's request: prompts, defaults, bias, bad words, names of fields."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from spec_serve.api import messages as m
from spec_serve.api.convert import (
    GREEDY,
    SamplingDefaults,
    read_generation_config,
    sampling_defaults,
    to_request,
    wire_field,
)
from spec_serve.spec.request import Request, RequestError
from tests.api.tokens import TinyTokens

TOKENS = TinyTokens()


def made(**values: Any) -> Request:
    wire = m.generate({"type": "generate", "gen": "a", "prompt": "x", **values})
    return to_request(wire, TOKENS).request


def refused(wire: m.Generate, **kwargs: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        to_request(wire, TOKENS, **kwargs)
    return caught.value


def test_three_kinds_of_prompt() -> None:
    assert made(prompt="hello").prompt == TOKENS.encode("hello")
    ids = m.Generate("a", token_ids=[5, 6])
    assert to_request(ids, TOKENS).request.prompt == [5, 6]
    chat = m.Generate("a", messages=[m.ChatMessage("user", "hi")])
    wanted = TOKENS.render_chat([{"role": "user", "content": "hi"}])
    assert to_request(chat, TOKENS).request.prompt == wanted
    content = [{"type": "text", "text": "h"}, {"type": "text", "text": "i"}]
    parts = m.Generate("a", messages=[m.ChatMessage("user", content)])
    assert to_request(parts, TOKENS).request.prompt == wanted


@pytest.mark.parametrize(
    "wire",
    [m.Generate("a"), m.Generate("a", prompt="x", token_ids=[1]),
     m.Generate("a", token_ids=[1], messages=[m.ChatMessage("user", "x")])],
)  # fmt: skip
def test_exactly_one_prompt(wire: m.Generate) -> None:
    assert "exactly one of prompt, token_ids and messages" in str(refused(wire))


@pytest.mark.parametrize(
    ("message", "field"),
    [
        (m.ChatMessage("user"), "messages[1].content"),
        (m.ChatMessage("user", [{"type": "image_url", "image_url": {"url": "http://x"}}]),
         "messages[1].content[0]"),
        (m.ChatMessage("user", [{"type": "text", "text": 5}]), "messages[1].content[0]"),
    ],
)  # fmt: skip
def test_content_that_is_no_text_is_refused(message: m.ChatMessage, field: str) -> None:
    wire = m.Generate("a", messages=[m.ChatMessage("system", "s"), message])
    assert refused(wire).field == field


def test_half_a_surrogate_pair_is_refused() -> None:
    wire = m.Generate("a", prompt="x\ud83d")
    assert refused(wire).field == "prompt"
    wire = m.Generate("a", messages=[m.ChatMessage("user", "\ud83d")])
    assert refused(wire).field == "messages"


def test_the_model_must_be_the_one_served() -> None:
    error = refused(m.Generate("a", prompt="x", model="other"), models=("tiny",))
    assert (error.code, error.field) == ("model_not_found", "model")
    wire = m.Generate("a", prompt="x", model="tiny")
    assert to_request(wire, TOKENS, models=("tiny",)).request.prompt


def test_absent_means_the_servers_default_and_zero_means_zero() -> None:
    defaults = SamplingDefaults(0.7, 0.9, 40, 0.05, 1.1)
    wire = m.Generate("a", prompt="x")
    absent = to_request(wire, TOKENS, defaults=defaults).request.sampling
    assert (absent.temperature, absent.top_p, absent.top_k) == (0.7, 0.9, 40)
    assert (absent.min_p, absent.repetition_penalty) == (0.05, 1.1)
    wire.sampling = m.Sampling(temperature=0.0, top_p=1.0, top_k=0, min_p=0.0)
    given = to_request(wire, TOKENS, defaults=defaults).request.sampling
    assert (given.temperature, given.top_p, given.top_k, given.min_p) == (0.0, 1.0, 0, 0.0)
    assert made().sampling.temperature == 0.0 and made().sampling.seed is None


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ({}, GREEDY),
        ({"temperature": 0.6, "top_p": 0.95, "top_k": 20}, SamplingDefaults(0.6, 0.95, 20)),
        ({"do_sample": False, "temperature": 0.6}, GREEDY),
        ({"do_sample": True}, SamplingDefaults(1.0)),
        ({"do_sample": True, "repetition_penalty": 1.05},
         SamplingDefaults(1.0, repetition_penalty=1.05)),
        ({"temperature": "hot", "top_p": 7, "top_k": -1, "min_p": None}, GREEDY),
        ({"temperature": float("nan"), "top_p": True}, GREEDY),
    ],
)  # fmt: skip
def test_generation_config(held: dict[str, Any], wanted: SamplingDefaults) -> None:
    assert sampling_defaults(held) == wanted


def test_a_generation_config_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    for text in ("{", "[1]", "\ud83d".encode("utf-16", "surrogatepass").decode("latin-1")):
        (tmp_path / "generation_config.json").write_text(text, encoding="latin-1")
        assert read_generation_config(tmp_path) == {}
    (tmp_path / "generation_config.json").write_text('{"top_k": 5}')
    assert sampling_defaults(read_generation_config(tmp_path)).top_k == 5


@pytest.mark.parametrize("key", ["foo", "-1", "1.0", "", " 1", "\u0661", "9" * 40, "1_0"])
def test_bias_on_what_is_no_id_is_refused(key: str) -> None:
    wire = m.Generate("a", prompt="x", sampling=m.Sampling(logit_bias={key: 1.0}))
    assert refused(wire).field == "sampling.logit_bias"


def test_bias_twice_on_one_id_is_refused() -> None:
    wire = m.Generate("a", prompt="x", sampling=m.Sampling(logit_bias={"1": 1.0, "01": 2.0}))
    assert "twice" in str(refused(wire))
    assert made(sampling={"logit_bias": {"7": -5}}).sampling.logit_bias == {7: -5.0}


def test_bad_words_are_tokens_with_and_without_a_space_before() -> None:
    words = made(bad_words=["the"]).sampling.bad_words
    assert set(words) == {tuple(TOKENS.encode("the")), tuple(TOKENS.encode(" the"))}


def test_stops_make_a_watch_and_nothing_else_does() -> None:
    assert made().stopping.watch is None
    stopping = made(stop=["lo w"], min_tokens=2, stop_token_ids=[4], ignore_eos=True).stopping
    assert stopping.watch is not None and stopping.watch() is not stopping.watch()
    assert stopping.watch().feed(TOKENS.encode("hello world"), 0) is not None
    assert (stopping.min_tokens, stopping.token_ids) == (2, frozenset({4}))
    assert stopping.ignore_eos and stopping.eos == TOKENS.eos_ids


def test_speculation_passes_through_and_predictions_become_tokens() -> None:
    asked = {"mode": "max", "max_nodes": 3, "sources": ["lookup"], "prediction": "hello"}
    spec = made(speculation=asked).speculation
    assert (spec.mode, spec.max_nodes, spec.sources) == ("max", 3, frozenset({"lookup"}))
    assert spec.prediction == tuple(TOKENS.encode("hello"))
    assert made(speculation={"sources": []}).speculation.sources == frozenset()


def test_the_earlier_deadline_counts() -> None:
    wire = m.Generate("a", prompt="x", timeout_s=50.0)
    now = time.monotonic()
    soon = to_request(wire, TOKENS, deadline=now + 1).request.deadline
    assert soon == now + 1
    own = to_request(wire, TOKENS, deadline=now + 1000).request.deadline
    assert own is not None and now + 49 < own < now + 60
    assert made().deadline is None


def test_ids_are_new_unless_given() -> None:
    assert made().id != made().id
    assert to_request(m.Generate("a", prompt="x"), TOKENS, request_id="mine").request.id == "mine"


def test_fields_are_named_as_the_client_wrote_them() -> None:
    prompt, chat = m.Generate("a", prompt="x"), m.Generate("a", messages=[])
    assert wire_field(prompt, "prompt") == "prompt"
    assert wire_field(chat, "prompt") == "messages"
    assert wire_field(m.Generate("a", token_ids=[1]), "prompt") == "token_ids"
    assert wire_field(prompt, "logit_bias[5]") == "sampling.logit_bias[5]"
    assert wire_field(prompt, "stop_token_ids") == "stop_token_ids"
