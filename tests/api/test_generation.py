"""From the engine's events to messages: text per step, numbering, merging, ends and errors."""

from __future__ import annotations

import math
from typing import Any

import pytest

from spec_serve.api import generation as g
from spec_serve.api import messages as m
from spec_serve.api.convert import to_request
from spec_serve.spec.request import (
    Delta,
    Finished,
    PromptScored,
    RequestError,
    RequestTimings,
    Started,
    StepRecord,
    TokenLogprob,
    Usage,
)
from tests.api.tokens import TinyTokens

TOKENS = TinyTokens()


def step(number: int = 0, drafted: int = 0, accepted: int = 0) -> StepRecord:
    sources = {"lookup": (drafted, accepted)} if drafted else {}
    tree = list(range(drafted))
    return StepRecord(
        number, drafted, accepted, sources, 1, 2, 3, 1, tree, [i - 1 for i in tree]
    )  # fmt: skip


class Run:
    """A generation under test: `say` feeds events, `out` takes what would be sent."""

    def __init__(self, n: int = 1, **values: Any) -> None:
        wire = m.generate(
            {"type": "generate", "gen": "g", "prompt": "x", "sampling": {"n": n}, **values}
        )
        self.prepared = to_request(wire, TOKENS, request_id="r")
        self.outbox = g.Outbox(lambda: None)
        self.cancelled: list[str] = []
        self.ended: list[str] = []
        self.generation = g.Generation(
            "g", "tiny", self.prepared, self.outbox, self.cancelled.append, self.ended.append
        )

    def start(self, index: int = 0) -> None:
        self.generation.take(Started(self.prepared.request, index, 1, 0.5))

    def say(
        self, tokens: list[int] | str, index: int = 0, record: StepRecord | None = None,
        logprobs: list[TokenLogprob] | None = None,
    ) -> None:  # fmt: skip
        ids = TOKENS.encode(tokens) if isinstance(tokens, str) else tokens
        made = Delta(self.prepared.request, index, ids, logprobs, record or step())
        self.generation.take(made)

    def end(
        self, index: int = 0, reason: Any = "length", matched: int | str | None = None,
        error: RequestError | None = None,
    ) -> None:  # fmt: skip
        usage, timings = Usage(1, 0, 3), RequestTimings(1, 2, 3, 4)
        self.generation.take(
            Finished(self.prepared.request, index, reason, matched, usage, timings, error)
        )

    def out(self) -> list[Any]:
        return list(self.outbox.take())


def test_a_run_of_messages_is_numbered_without_gaps() -> None:
    run = Run(ids=True)
    run.start()
    run.say("ab")
    first = run.out()
    run.say("cd", record=step(1, 3, 1))
    run.end()
    out = first + run.out()
    assert [(type(message), message.seq) for message in out] == [
        (m.Started, 0), (m.Delta, 1), (m.Delta, 2), (m.Finished, 3)
    ]  # fmt: skip
    assert [message.text for message in out[1:3]] == ["ab", "cd"]
    assert out[1].ids == TOKENS.encode("ab")
    assert out[2].steps[0].sources == {"lookup": (3, 1)}
    assert out[0].prompt_tokens == len(TOKENS.encode("x")) and out[0].id == "r"
    finished = out[3]
    assert finished.last and finished.reason == "length"
    assert finished.usage.completion_tokens == 3 and finished.timings.decode_ms == 4
    assert finished.speculation == m.Summary(2, 3, 1, 1.5, 1 / 3, [1, 1])
    assert run.generation.over and run.ended == ["g"]
    run.say("more")
    assert run.out() == []


def test_characters_and_stops_are_held_back_until_they_are_decided() -> None:
    run = Run(stop=["QQQ"], steps="none")
    ids = TOKENS.encode("\U0001f600")
    assert len(ids) > 1
    run.say(ids[:1])
    assert run.out() == []
    run.say(ids[1:])
    run.say("aQQ")
    run.say("b")
    assert [message.text for message in run.out()] == ["\U0001f600", "a", "QQb"]
    run.say("zQQQ")
    run.end(reason="stop", matched="QQQ")
    delta, finished = run.out()
    assert delta.text == "z" and finished.matched == "QQQ" and finished.speculation is None


def test_what_was_held_back_comes_before_the_end() -> None:
    run = Run(stop=["abc"], steps="none")
    run.say([*TOKENS.encode("xab"), *TOKENS.encode("\u6f22")[:1]])
    run.out()
    run.end()
    delta, finished = run.out()
    assert (delta.text, type(finished)) == ("ab\ufffd", m.Finished)


def test_steps_are_told_even_without_text() -> None:
    run = Run()
    run.say(TOKENS.encode("\U0001f600")[:1], record=step(0, 2, 0))
    (delta,) = run.out()
    assert delta.text == "" and delta.steps[0].drafted == 2 and delta.steps[0].drafted_ids == []


def test_the_tree_is_shown_on_demand() -> None:
    run = Run(steps="tokens")
    made = step(0, 3, 1)
    made.tree_sources = ["suffix", "suffix", "radix"]
    run.say("a", record=made)
    (delta,) = run.out()
    shown = delta.steps[0]
    assert shown.drafted_sources == ["suffix", "suffix", "radix"]
    assert shown.drafted_ids == [0, 1, 2] and shown.drafted_parents == [-1, 0, 1]
    assert shown.drafted_text == [TOKENS.token_text(i) for i in range(3)]


def test_log_probabilities_are_finite_in_every_encoding() -> None:
    run = Run(logprobs=2, prompt_logprobs=1)
    wrong = [TokenLogprob(65, -math.inf, [(65, -0.1), (66, -math.inf)])]
    run.generation.take(PromptScored(run.prepared.request, 0, wrong))
    run.say([65], logprobs=wrong)
    scored, delta = run.out()
    wanted = m.Logprob(
        65, g.FLOOR, TOKENS.token_text(65),
        [(65, -0.1, TOKENS.token_text(65)), (66, g.FLOOR, TOKENS.token_text(66))],
    )  # fmt: skip
    assert scored.logprobs == [wanted] and delta.logprobs == [wanted]
    for name in m.SUBPROTOCOLS:
        codec = m.Codec(name)
        assert codec.server_message(codec.encode(delta)) == delta
    assert b"null" not in m.Codec(m.JSON).encode(delta)


def test_choices_end_one_by_one_and_only_the_last_is_last() -> None:
    run = Run(n=3, steps="none")
    run.start(0)
    run.start(1)
    run.say("a", 1)
    run.end(2)
    run.say("b", 0)
    run.end(0)
    run.end(1)
    out = run.out()
    assert [type(message) for message in out].count(m.Started) == 1
    assert [message.seq for message in out] == list(range(6))
    ends = [message for message in out if isinstance(message, m.Finished)]
    assert [(end.index, end.last) for end in ends] == [(2, False), (0, False), (1, True)]


def test_an_error_ends_every_choice() -> None:
    run = Run(n=2)
    run.start()
    run.end(0, reason="error", error=RequestError("deadline", "has passed", "timeout"))
    run.end(1)
    started, error = run.out()
    assert isinstance(error, m.Error) and error.seq == 1 and error.gen == "g"
    assert (error.code, error.param) == ("timeout", "deadline")
    assert run.cancelled == ["r"] and run.ended == ["g"]


@pytest.mark.parametrize(
    ("error", "code", "param", "retryable"),
    [
        (RequestError("temperature", "bad"), "invalid_request", "sampling.temperature", False),
        (RequestError("", "full", "overloaded"), "overloaded", None, True),
        (RequestError("", "bye", "draining"), "draining", None, True),
        (RequestError("", "odd", "never heard of"), "engine_error", None, False),
        (RequestError("prompt", "long", "context_length_exceeded"), "context_length_exceeded",
         "prompt", False),
    ],
)  # fmt: skip
def test_failures(error: RequestError, code: str, param: str | None, retryable: bool) -> None:
    made = g.failure(error, "g", m.Generate("g", prompt="x"))
    assert (made.code, made.param, made.retryable) == (code, param, retryable)
    assert (made.retry_after_ms > 0) == retryable
    if param:
        assert made.message.startswith(param)


def test_a_slow_readers_deltas_are_merged_and_nothing_is_lost() -> None:
    run = Run(n=2, ids=True)
    run.start()
    texts = {0: "", 1: ""}
    for i in range(200):
        run.say(chr(97 + i % 26), i % 2, step(i))
        texts[i % 2] += chr(97 + i % 26)
    assert len(run.outbox) <= g.MERGE_FROM + 2
    run.end(0)
    run.end(1)
    out = run.out()
    assert [message.seq for message in out] == list(range(len(out)))
    deltas = [message for message in out if isinstance(message, m.Delta)]
    for index in (0, 1):
        own = [delta for delta in deltas if delta.index == index]
        assert "".join(delta.text for delta in own) == texts[index]
        assert sum((delta.ids for delta in own), []) == TOKENS.encode(texts[index])
        numbers = [record.step for delta in own for record in delta.steps]
        assert numbers == list(range(index, 200, 2))


def test_a_reader_that_stands_still_overflows(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(ids=True)
    now = [100.0]
    monkeypatch.setattr(g, "monotonic", lambda: now[0])
    run.say("a")
    assert not run.outbox.overflowing
    now[0] += g.MAX_STUCK_S + 1
    assert run.outbox.overflowing
    run.out()
    assert not run.outbox.overflowing
    for i in range(12):
        assert run.outbox.overflowing == (i * 8 * 20_000 > g.MAX_BYTES)
        run.say([65] * 20_000)  # a character and an id: 2 and 6 bytes
    run.out()
    assert not run.outbox.overflowing


def test_generations_of_one_socket_are_numbered_apart() -> None:
    outbox = g.Outbox(lambda: None)
    for gen in ("a", "b", "a"):
        outbox.put(m.Delta(gen, 0, 0, "x"))
        outbox.take()
    outbox.put(m.Delta("b", 0, 0, "y"))
    outbox.put(m.Error("timeout", "late", gen="b"))
    outbox.put(m.Delta("b", 0, 0, "a new one of that name"))
    outbox.put(m.Delta("a", 0, 0, "z"))
    assert [(x.gen, x.seq) for x in outbox.take()] == [("b", 1), ("b", 2), ("b", 0), ("a", 2)]
