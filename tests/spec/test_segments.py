"""Several generations in one request: token for token those of requests of their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from spec_serve.api.text import StopStrings, StopWatch
from spec_serve.spec.completion import Completion
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import (
    Constraint,
    Delta,
    Finished,
    Request,
    RequestError,
    SegmentFinished,
    Stopping,
)
from tests.engines import engine, request
from tests.grammars import spelling

PROMPT = [5, 9, 200, 31, 7, 7, 80, 9, 200]


def watched(*stops: str) -> StopWatch:
    return StopWatch(spelling(), StopStrings(stops))


def asked() -> list[Request]:
    """A prompt and what follows: texts between and every way to end."""
    made = [
        request(PROMPT, 5, logprobs=2),
        request([40, 41, 42], 7, temperature=1.0, seed=3, repetition_penalty=1.3),
        request([60], 6, constraint=Constraint("choices", '["yes", "no, never"]')),
        request([9, 200, 31, 7], 8, temperature=0.9, seed=5),
        request(list(range(100, 240)), 4, frequency_penalty=0.5),
    ]
    return made


def one_by_one(on: Engine, parts: Sequence[Request]) -> list[Completion]:
    """Each as a request of its own, behind what the one before keeps."""
    found: list[Completion] = []
    prompt: list[int] = []
    for part in parts:
        prompt = prompt + part.prompt
        (done,) = on.generate([_copy(part, prompt)])
        found.append(done)
        kept = len(done.tokens)
        if done.reason == "stop" and isinstance(done.matched, int):
            kept -= 1
        if isinstance(done.matched, str):
            text = b""
            while done.matched.encode() not in text:
                kept -= 1
                text = spelling().token_bytes(done.tokens[kept]) + text
        prompt = prompt + done.tokens[:kept]
    return found


def _copy(part: Request, prompt: list[int], **more: Any) -> Request:
    names = {name: getattr(part, name) for name in ("sampling", "stopping", "constraint")}
    return Request(next_id(), prompt, logprobs=part.logprobs, **names, **more)


_count = iter(range(10**6))


def next_id() -> str:
    return f"segments-{next(_count)}"


def at_once(on: Engine, parts: Sequence[Request]) -> tuple[list[list[int]], list[Any]]:
    """All in one: tokens of each segment, and how each ended."""
    first, *rest = parts
    whole = _copy(first, first.prompt, segments=tuple(_copy(one, one.prompt) for one in rest))
    on.submit(whole)
    tokens: list[list[int]] = [[]]
    ends: list[Any] = []
    while not on.idle():
        for event in on.step():
            assert event.request is whole and event.index == 0
            if isinstance(event, Delta):
                tokens[-1] += event.tokens
            elif isinstance(event, SegmentFinished | Finished):
                ends.append(event)
            if isinstance(event, SegmentFinished):
                tokens.append([])
    on.store.check()
    return tokens, ends


@pytest.mark.parametrize("kind", ["none", "lookup", "near"])
def test_tokens_are_those_of_requests_one_by_one(kind: str) -> None:
    on = engine(kind, spelling=spelling())
    parts = asked()
    expected = one_by_one(on, parts)
    on.flush()
    tokens, ends = at_once(on, parts)
    assert tokens == [done.tokens for done in expected]
    assert [(e.reason, e.matched) for e in ends] == [(d.reason, d.matched) for d in expected]
    assert [e.constraint for e in ends] == [d.constraint for d in expected]
    assert [type(e) for e in ends] == [SegmentFinished] * 4 + [Finished]
    usage = ends[-1].usage
    assert usage.completion_tokens == sum(map(len, tokens))
    assert usage.prompt_tokens == sum(len(part.prompt) for part in parts)
    assert ends[-1].own.completion_tokens == len(tokens[-1])


def test_stops_are_not_kept() -> None:
    on = engine("lookup", spelling=spelling())
    (plain,) = on.generate([request(PROMPT, 12)])
    end = plain.tokens[4]
    text = spelling().token_bytes(plain.tokens[6]).decode("utf-8", "replace")
    for stopping in (
        Stopping(max_tokens=12, token_ids=frozenset({end})),
        Stopping(max_tokens=12, watch=watched(text)),
    ):
        parts = [request(PROMPT, 12), request([7, 8], 6)]
        parts[0].stopping = stopping
        expected = one_by_one(on, parts)
        assert expected[0].reason == "stop"
        tokens, ends = at_once(on, parts)
        assert tokens == [done.tokens for done in expected]
        assert ends[0].matched == expected[0].matched


def test_a_stop_string_that_begins_within_a_token_ends_it_all() -> None:
    on = engine("none", spelling=spelling())
    table = spelling()
    first = next(i for i in range(table.vocab_size) if len(table.token_bytes(i)) > 2)
    word = table.token_bytes(first).decode()
    parts = [request(PROMPT, 9), request([7, 8], 6)]
    parts[0].stopping = Stopping(max_tokens=9, watch=watched(word[1:]))
    parts[0].constraint = Constraint("choices", f'["{word}", "{word}{word}"]')
    tokens, ends = at_once(on, parts)
    assert len(tokens) == 1 and type(ends[0]) is Finished and ends[0].matched == word[1:]


def test_what_has_no_room_is_left_to_the_client_or_refused() -> None:
    on = engine("none", kv_tokens=40, spelling=spelling())
    tokens, ends = at_once(on, [request(PROMPT, 20), request([3] * 8, 9), request([4] * 8, 9)])
    assert [len(one) for one in tokens] == [20, 2]
    assert (type(ends[-1]), ends[-1].reason) == (Finished, "length")
    for parts, said in (
        ([request(PROMPT, 2), request([3] * 40, 9)], "more than the"),
        ([request(PROMPT, 2), request([], 9)], r"segments\[0\].prompt"),
        ([request(PROMPT, 2, n=2), request([3], 9)], "several choices"),
        ([request(PROMPT, 2)] + [request([3], 1)] * 65, "more than 64"),
    ):
        with pytest.raises(RequestError, match=said):
            first, *rest = parts
            first.segments = tuple(rest)
            on.submit(first)


def test_a_cancelled_one_ends_where_it_is() -> None:
    on = engine("near", spelling=spelling())
    whole = _copy(request(PROMPT, 3), PROMPT, segments=(_copy(request([3, 4], 500), [3, 4]),))
    on.submit(whole)
    seen: list[Any] = []
    while not any(isinstance(event, SegmentFinished) for event in seen):
        seen = on.step()
    on.step()
    on.cancel(whole.id)
    last: list[Any] = []
    while not on.idle():
        last += on.step()
    assert isinstance(last[-1], Finished) and last[-1].reason == "cancelled"
    on.store.check()
