"""Edges of the engine's life: what ends, fails, repeats or is preempted at an awkward moment."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from spec_serve.spec.admission import Limits
from spec_serve.spec.request import Event, Finished, RequestError
from spec_serve.spec.step import Job, Result
from tests.engines import end, engine, finish, ids, prompts, request, run, tokens

PROMPT = prompts(1, 20, 24, seed=21)[0]


class Poisoned:
    """A device that fails on every step that holds a certain token, after it has run."""

    def __init__(self, inner: Any, token: int) -> None:
        self.inner = inner
        self.token = token

    def step(self, job: Job) -> Result:
        result: Result = self.inner.step(job)
        if any(self.token in list(twig.tree.tokens[: twig.tree.given]) for twig in job.twigs):
            raise RuntimeError("poison")
        return result


@pytest.mark.parametrize("place", [0, 1, 2])
def test_a_request_that_breaks_every_step_costs_only_itself(place: int) -> None:
    on = engine("near", lookup=True, depth=3, width=2)
    on._device = Poisoned(on._device, 299)
    asked = [request(p, 12, logit_bias={299: -100.0}) for p in prompts(3, 6, 20, seed=22)]
    asked[place] = request([1, 2, 299, 4], 12)
    done = run(on, *asked)
    for i, one in enumerate(done):
        if i == place:
            assert one.error is not None and one.error.code == "engine_error"
            assert "poison" not in str(one.error)
        else:
            assert one.error is None
            assert one.tokens == run(engine(), one.request)[0].tokens


def test_a_broken_device_ends_everything_and_nothing_hangs() -> None:
    class Dead:
        def step(self, job: Job) -> Result:
            raise RuntimeError("gone")

    on = engine("near", max_rows=2)
    on._device = Dead()
    done = run(on, *(request(p, 4, n=2) for p in prompts(3)))
    assert [one.reason for one in done] == ["error"] * 6


class Angry:
    """A watch that fails at its second call."""

    def __init__(self) -> None:
        self.calls = 0

    def feed(self, new: Sequence[int], active_from: int) -> None:
        self.calls += 1
        if self.calls == 2:
            raise KeyError("watch")


def test_a_watch_that_fails_costs_its_own_request() -> None:
    on = engine("near", lookup=True, depth=3, width=2)
    first, angry, last = (request(PROMPT[i:], 12, temperature=0.5, seed=i) for i in range(3))
    angry.stopping = request([1], 12, watch=Angry).stopping
    for one in (first, angry, last):
        on.submit(one)
    told = finish(on)
    failed = end(told[angry.id])
    assert failed.error is not None and failed.error.code == "engine_error"
    assert failed.usage.completion_tokens == len(ids(told[angry.id])) >= 1
    for one in (first, last):
        assert ids(told[one.id]) == run(engine(), one)[0].tokens


def test_a_watch_that_cannot_be_made_is_refused_and_leaves_nothing() -> None:
    def bad() -> None:
        raise LookupError("no tokenizer")

    on = engine()
    one = request(PROMPT, 4, watch=bad)  # type: ignore[arg-type]
    with pytest.raises(LookupError):
        on.submit(one)
    assert on.idle() and on.stats().waiting == 0
    again = request(PROMPT, 4)
    again.id = one.id
    assert run(on, again)[0].reason == "length"


def test_a_source_that_fails_costs_its_own_request() -> None:
    class Broken:
        name = "suffix"

        def extend(self, new: Sequence[int]) -> None: ...

        def guess(self, limit: int) -> list[Any]:
            raise ZeroDivisionError

    on = engine("near", lookup=True)
    asked = [request(p, 10) for p in prompts(3, 10, 20, seed=23)]
    for one in asked:
        on.submit(one)
    on.step()
    on.scheduler.running[1].sources = [Broken()]
    broken = on.scheduler.running[1].request.id
    told = finish(on)
    for one in asked:
        assert (end(told[one.id]).reason == "error") == (one.id == broken)


@pytest.mark.parametrize("how", ["cancel", "deadline"])
@pytest.mark.parametrize("n", [1, 3])
def test_an_end_at_any_step_of_any_phase(how: str, n: int) -> None:
    prompt = prompts(1, 50, 50, seed=24)[0]
    options: dict[str, Any] = {"n": n, "temperature": 0.9, "seed": 3, "prompt_logprobs": 0}
    expected = [done.tokens for done in run(engine(), request(prompt, 6, **options))]
    beside = tokens(engine(), PROMPT, 20)
    for step in range(14):
        on = engine("near", lookup=True, depth=3, width=2, step_tokens=24, kv_tokens=220)
        one, other = request(prompt, 6, **options), request(PROMPT, 20)
        on.submit(one)
        on.submit(other)
        told: list[Event] = []
        for _ in range(step):
            told += on.step()
        if how == "cancel":
            on.cancel(one.id)
        elif one.id in on._live or one.id in on._inbox:
            one.deadline = time.monotonic() - 1
            on._timed |= set(on._live.get(one.id, ()))
        told += on.step()
        over = {e.index: e for e in told if isinstance(e, Finished) and e.request is one}
        assert sorted(over) == list(range(n))
        for index, event in over.items():
            got = ids([e for e in told if e.request is one and e.index == index])
            assert got == expected[index][: len(got)]
            assert event.usage.completion_tokens == len(got)
            assert event.reason in ("length", "cancelled" if how == "cancel" else "error")
        rest = finish(on).get(other.id, [])
        assert ids([e for e in told if e.request is other] + rest) == beside


def test_a_late_cancel_does_not_hit_a_later_request_of_the_same_name() -> None:
    on = engine()
    first = request(PROMPT, 1)
    on.cancel(first.id)
    on.submit(first)
    assert end(finish(on)[first.id]).reason == "length"
    on.cancel(first.id)
    again = request(PROMPT, 3)
    again.id = first.id
    on.submit(again)
    assert end(finish(on)[first.id]).reason == "length"

    class Cancels:
        """Cancels in the middle of the step that ends the request."""

        def __init__(self, inner: Any) -> None:
            self.inner = inner

        def step(self, job: Job) -> Result:
            on.cancel(first.id)
            return self.inner.step(job)  # type: ignore[no-any-return]

    inner = on._device
    on._device = Cancels(inner)
    third = request(PROMPT, 1)
    third.id = first.id
    on.submit(third)
    assert [e.reason for e in on.step() if isinstance(e, Finished)] == ["length"]
    on._device = inner
    again = request(PROMPT, 2)
    again.id = first.id
    on.submit(again)
    assert end(finish(on)[first.id]).reason == "length"


def test_a_request_can_be_cancelled_before_it_was_taken_in_and_its_name_used_again() -> None:
    on = engine()
    one = request(PROMPT, 5, n=2)
    on.submit(one)
    with pytest.raises(RequestError, match="already running"):
        on.submit(one)
    on.cancel(one.id)
    assert [e.reason for e in on.step() if isinstance(e, Finished)] == ["cancelled"] * 2
    assert on.idle()
    assert run(on, one)[0].reason == "length"


def test_generate_refuses_before_it_runs_and_never_waits_for_room_that_cannot_come() -> None:
    on = engine()
    with pytest.raises(RequestError):
        on.generate([request(PROMPT, 5), request([], 5)])
    assert on.idle()
    on = engine(max_rows=1)
    on.limits = Limits(max_waiting=0)
    with pytest.raises(RequestError, match="too many"):
        on.generate([request(PROMPT, 5, n=2)])
    assert len(on.generate([request(PROMPT, 5), request(PROMPT, 5)])) == 2


def test_waiting_time_counts_from_submission() -> None:
    on = engine()
    one = request(PROMPT, 2)
    on.submit(one)
    time.sleep(0.02)
    timings = end(finish(on)[one.id]).timings
    assert timings.queue_ms >= 20
    assert timings.ttft_ms == pytest.approx(timings.queue_ms + timings.prefill_ms, abs=1.0)
