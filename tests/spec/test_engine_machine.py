"""A whole engine driven at random: whatever happens around a request, its tokens are those of OFF.

Hypothesis submits, cancels, lets deadlines pass, breaks steps and steps an engine whose pool is
tight; after every step the books balance and the pool's table says what the store says.
"""

from __future__ import annotations

import time
from functools import cache
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from spec_serve.spec.engine import Engine
from spec_serve.spec.request import (
    Delta,
    Event,
    Finished,
    PromptScored,
    Request,
    Speculation,
    Started,
)
from spec_serve.spec.step import Job, Result
from tests.engines import engine, request, run

STEM = tuple((7 * i * i + 3 * i) % 300 for i in range(24))
LONGEST = 14
TAILS = ((1, 2, 3), (9,), (1, 2, 9, 9, 9, 9), tuple(range(40, 70)))
SAMPLING: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.0, "seed": -(2**63), "presence_penalty": 0.5, "repetition_penalty": 1.2},
    {"temperature": 0.8, "seed": 2**64 - 1, "top_k": 20},
)
SPECULATION = (
    Speculation(),
    Speculation(mode="off"),
    Speculation(mode="max"),
    Speculation(max_nodes=0),
    Speculation(mode="max", max_nodes=1),
    Speculation(sources=frozenset({"standalone"})),
    Speculation(sources=frozenset({"suffix", "radix"}), prediction=STEM),
    Speculation(mode="max", prediction=STEM[4:] + TAILS[0]),
)


@cache
def plain() -> Engine:
    """OFF, with room for everything."""
    return engine()


@cache
def alone(prompt: tuple[int, ...], sampling: int) -> tuple[tuple[Any, ...], ...]:
    """Tokens, log-probabilities and prompt log-probabilities of each choice, by OFF and alone."""
    one = request(prompt, LONGEST, n=3, logprobs=1, prompt_logprobs=1, **SAMPLING[sampling])
    made = []
    for done in run(plain(), one):
        assert done.logprobs is not None and done.prompt_logprobs is not None
        made.append((done.tokens, done.logprobs, done.prompt_logprobs))
    return tuple(made)


class Breaking:
    """A device that fails as often as it is told to."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.failures = 0
        self.after = False

    def step(self, job: Job) -> Result:
        if self.failures and not self.after:
            self.failures -= 1
            raise RuntimeError("broken before it ran")
        result: Result = self.inner.step(job)
        if self.failures:
            self.failures -= 1
            raise RuntimeError("broken after it ran")
        return result


class EngineMachine(RuleBasedStateMachine):
    """One engine and what it has told so far."""

    @initialize(
        kind=st.sampled_from(("near", "self", "lookup", "second")),
        slots=st.sampled_from((72, 90, 130, 400)),
        rows=st.integers(1, 4),
        shape=st.sampled_from(((1, 1), (3, 2), (4, 1))),
        budget=st.sampled_from((16, 24, 512)),
    )
    def build(self, kind: str, slots: int, rows: int, shape: tuple[int, int], budget: int) -> None:
        self.engine = engine(
            kind, lookup=True, depth=shape[0], width=shape[1], kv_tokens=slots, max_rows=rows,
            step_tokens=budget,
        )  # fmt: skip
        self.device = Breaking(self.engine._device)
        self.engine._device = self.device
        self.standalone = kind != "lookup"
        self.asked: dict[str, tuple[Request, int, int]] = {}
        self.breaks_left = 0
        self.doomed: set[str] = set()
        self.told: dict[tuple[str, int], list[Event]] = {}
        self.over: set[tuple[str, int]] = set()

    @rule(
        stem=st.sampled_from((0, 5, 12, len(STEM))),
        tail=st.sampled_from(TAILS),
        limit=st.integers(1, LONGEST),
        sampling=st.integers(0, len(SAMPLING) - 1),
        speculation=st.sampled_from(SPECULATION),
        n=st.sampled_from((1, 1, 1, 2, 3)),
        logprobs=st.sampled_from((None, None, 0, 1)),
        prompt_logprobs=st.sampled_from((None, None, None, 1)),
        priority=st.sampled_from((0, 0, 0, 1)),
        salt=st.sampled_from(("", "", "x")),
    )
    def submit(
        self, stem: int, tail: tuple[int, ...], limit: int, sampling: int,
        speculation: Speculation, n: int, logprobs: int | None, prompt_logprobs: int | None,
        priority: int, salt: str,
    ) -> None:  # fmt: skip
        if not self.standalone and speculation.sources == frozenset({"standalone"}):
            speculation = Speculation()
        prompt = STEM[:stem] + tail
        one = request(
            prompt, limit, n=n, logprobs=logprobs, prompt_logprobs=prompt_logprobs,
            speculation=speculation, salt=salt, **SAMPLING[sampling],
        )  # fmt: skip
        one.priority = priority
        self.engine.submit(one)
        self.asked[one.id] = one, sampling, limit

    @rule(pick=st.integers(0, 99))
    def cancel(self, pick: int) -> None:
        if self.asked:
            name = list(self.asked)[pick % len(self.asked)]
            self.engine.cancel(name)
            self.doomed.add(name)

    @rule(pick=st.integers(0, 99))
    def overdue(self, pick: int) -> None:
        """A deadline that lies in the past by the time the request is taken in."""
        tail = TAILS[pick % len(TAILS)]
        one = request(tail, 5, n=1 + pick % 2)
        one.deadline = time.monotonic() - 1
        self.engine.submit(one)
        self.asked[one.id] = one, 0, 5
        self.doomed.add(one.id)

    @rule(after=st.booleans(), again=st.booleans())
    def breaks(self, after: bool, again: bool) -> None:
        """A step fails, perhaps the next one too. Of several rows none is lost by the first."""
        self.device.failures, self.device.after = 1 + again, after
        for _ in range(1 + again):
            alone = len(self.engine.scheduler.running) <= 1 or bool(self.engine._suspects)
            self.breaks_left += 1 if alone or again else 0
            self.step()
        self.device.failures = 0

    @rule(count=st.integers(1, 6))
    def steps(self, count: int) -> None:
        for _ in range(count):
            self.step()

    @rule()
    def forget(self) -> None:
        self.engine.store.clear()

    def step(self) -> None:
        for event in self.engine.step():
            self.hear(event)
        self.check()

    def hear(self, event: Event) -> None:
        key = event.request.id, event.index
        assert key not in self.over, "nothing comes after Finished"
        told = self.told.setdefault(key, [])
        assert isinstance(event, Finished | Started) or told, "Started comes first"
        assert not (isinstance(event, Started) and told), "Started comes once"
        told.append(event)
        if isinstance(event, Finished):
            self.over.add(key)
            self.judge(event, told)

    def judge(self, end: Finished, told: list[Event]) -> None:
        one, sampling, limit = self.asked[end.request.id]
        tokens, logprobs, prompt_logprobs = alone(tuple(one.prompt), sampling)[end.index]
        deltas = [event for event in told if isinstance(event, Delta)]
        got = [token for delta in deltas for token in delta.tokens]
        assert got == tokens[: len(got)]
        assert end.usage.completion_tokens == len(got)
        assert end.usage.prompt_tokens == len(one.prompt)
        if end.error is not None and end.error.code == "engine_error":
            self.breaks_left -= 1
            assert self.breaks_left >= 0, "a failed step costs one choice at most"
        elif one.id not in self.doomed:
            assert end.reason == "length", end.error
        if end.reason == "length":
            assert got == tokens[:limit]
        for delta in deltas:
            record = delta.step
            assert record.accepted <= record.drafted == len(record.tree_tokens)
            assert record.accepted in (len(delta.tokens), len(delta.tokens) - 1)
            most = one.speculation.max_nodes
            assert record.drafted <= (12 if most is None else most)
            assert one.speculation.mode != "off" or record.drafted == 0
            counted = [sum(pair) for pair in zip(*record.sources.values(), strict=True)]
            assert counted in ([], [record.drafted, record.accepted])
        if one.logprobs is not None:
            scored = [entry for delta in deltas for entry in delta.logprobs or ()]
            assert [entry.token for entry in scored] == got
            assert all(
                abs(entry.logprob - other.logprob) < 1e-3 and len(entry.top) == one.logprobs
                for entry, other in zip(scored, logprobs, strict=False)
            )
        scores = [event for event in told if isinstance(event, PromptScored)]
        if one.prompt_logprobs is None or not got:
            assert len(scores) <= (one.prompt_logprobs is not None)
        else:
            (score,) = scores
            assert [entry.token for entry in score.logprobs] == one.prompt[1:]
            assert all(
                abs(entry.logprob - other.logprob) < 1e-3
                for entry, other in zip(score.logprobs, prompt_logprobs, strict=True)
            )

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "engine"):
            return
        store = self.engine.store
        store.check()
        assert store.pool is not None
        for number, kv in store._rows.items():
            assert store.pool.table[number, : len(kv.slots)].tolist() == kv.slots
        running = self.engine.scheduler.running
        assert {id(row.kv) for row in running} == set(map(id, store._rows.values()))
        for row in running:
            assert row.kv is not None
            assert row.kv.granted == ([row.next_slot] if row.next_slot else [])

    def teardown(self) -> None:
        if not hasattr(self, "engine"):
            return
        for _ in range(4000):
            if self.engine.idle():
                break
            self.step()
        assert self.engine.idle(), "the engine makes no progress"
        assert len(self.over) == sum(one.n for one, _, _ in self.asked.values())
        books = self.engine.store.books()
        assert books.pinned == books.rows == books.granted == 0
        stats = self.engine.stats()
        assert (stats.running, stats.waiting, stats.finished) == (0, 0, len(self.over))
        assert stats.requests == len(self.asked)
        ends = [t[-1] for t in self.told.values()]
        assert stats.tokens_out == sum(e.usage.completion_tokens for e in ends)  # type: ignore[union-attr]
        assert not self.engine._live and not self.engine._timed and not self.engine._cancels


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(
    max_examples=25,
    stateful_step_count=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
