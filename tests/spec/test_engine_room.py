"""Room, order and numbers: who waits, who is preempted, and what is counted at awkward moments."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest

from spec_serve.spec.request import Delta, Event, Finished, Speculation, Started
from spec_serve.spec.step import Job, Result
from tests.engines import engine, finish, ids, prompts, request, run, target, tokens
from tests.tiny import tiny_model

PROMPT = prompts(1, 20, 24, seed=21)[0]

PROMPT = prompts(1, 20, 24, seed=21)[0]


def test_the_first_of_two_rows_that_do_not_fit_together_keeps_its_place() -> None:
    on = engine("near", depth=2, kv_tokens=100, max_rows=2)
    old, young = request(prompts(1, 28, 28)[0], 40), request(prompts(1, 20, 20, seed=4)[0], 40)
    expected = [run(engine(), one)[0].tokens for one in (old, young)]
    on.submit(old)
    on.step()
    on.submit(young)
    row = on.scheduler.running[0]
    while not on.idle() and row in on.scheduler.running:
        on.step()
        on.store.check()
    assert row.emitted == 40, "the older row was preempted"
    told = finish(on)
    assert ids(told[young.id]) == expected[1][-len(ids(told[young.id])) :]
    assert on.stats().preempted > 0


def test_higher_priority_is_preempted_last() -> None:
    on = engine(kv_tokens=100, max_rows=2)
    low, high = request(prompts(1, 28, 28)[0], 40), request(prompts(1, 20, 20, seed=4)[0], 40)
    high.priority = 1
    on.submit(low)
    on.step()
    on.submit(high)
    ends = []
    while not on.idle():
        ends += [e.request for e in on.step() if isinstance(e, Finished)]
    assert ends == [high, low]
    assert on.stats().preempted > 0


def test_what_does_not_fit_yet_waits_without_touching_the_cache() -> None:
    on = engine("near", lookup=True, depth=2, kv_tokens=200, max_rows=4)
    big, next_ = request(prompts(1, 80, 80)[0], 60), request(prompts(1, 90, 90, seed=9)[0], 5)
    on.submit(big)
    on.step()
    opened: list[object] = []
    inner = on.builder.open
    on.builder.open = lambda row: opened.append(row) or inner(row)  # type: ignore[method-assign,func-returns-value,assignment]
    on.submit(next_)
    told = finish(on)
    assert len(opened) <= 2
    assert ids(told[next_.id]) == tokens(engine(), next_.prompt, 5)
    assert on.stats().preempted == 0


def test_prompts_in_flight_are_counted_when_others_are_admitted() -> None:
    on = engine(kv_tokens=300, max_rows=8, step_tokens=32)
    chooser = random.Random(3)
    asked = [request([chooser.randrange(300) for _ in range(120)], 4) for _ in range(6)]
    done = run(on, *asked)
    assert [one.tokens for one in done] == [run(engine(), one)[0].tokens for one in asked]
    assert on.stats().preempted == 0, "admitted together, they would have had to be preempted"


def test_a_long_prompt_is_not_starved_by_short_ones_that_keep_coming(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [1000.0]
    monkeypatch.setattr("spec_serve.spec.engine.monotonic", lambda: clock[0])
    on = engine(step_tokens=16, max_rows=6)
    chooser = random.Random(2)
    long = request([chooser.randrange(300) for _ in range(200)], 1)
    on.submit(long)
    on.step()
    for _ in range(200):
        clock[0] += 0.1
        on.submit(request([chooser.randrange(300) for _ in range(20)], 1))
        if any(isinstance(e, Finished) and e.request is long for e in on.step()):
            break
    assert not any(row.request is long for row in on.scheduler.rows()), "starved"


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("kv_tokens", [70, 100, 1000])
def test_prompt_logprobs_with_choices_chunks_and_preemption(n: int, kv_tokens: int) -> None:
    on = engine("near", lookup=True, depth=2, step_tokens=16, kv_tokens=kv_tokens, max_rows=3)
    prompt = prompts(1, 30, 30, seed=25)[0]
    options: dict[str, Any] = {"n": n, "temperature": 1.0, "seed": 8, "logprobs": 2}
    wanted = request(prompt, 12, prompt_logprobs=3, **options)
    expected = run(engine(), wanted)
    others = [request(p, 20) for p in prompts(3, 10, 20, seed=26)]
    got = run(on, wanted, *others)[:n]
    for done, plain in zip(got, expected, strict=True):
        assert done.tokens == plain.tokens
        assert done.prompt_logprobs is not None and plain.prompt_logprobs is not None
        assert [e.token for e in done.prompt_logprobs] == prompt[1:]
        for entry, other in zip(done.prompt_logprobs, plain.prompt_logprobs, strict=True):
            assert entry.logprob == pytest.approx(other.logprob, abs=1e-4)
            assert [token for token, _ in entry.top] == [token for token, _ in other.top]
        assert done.logprobs is not None and [e.token for e in done.logprobs] == done.tokens
    assert (on.stats().preempted > 0) == (kv_tokens < 1000)


def test_followers_of_a_leader_that_fails_still_run() -> None:
    on = engine("near", depth=2)

    class Once:
        def __init__(self, inner: Any) -> None:
            self.inner = inner
            self.left = 2

        def step(self, job: Job) -> Result:
            if self.left:
                self.left -= 1
                raise RuntimeError
            return self.inner.step(job)  # type: ignore[no-any-return]

    on._device = Once(on._device)
    one = request(PROMPT, 6, n=3, temperature=1.0, seed=4)
    expected = run(engine(), one)
    done = run(on, one)
    assert done[0].reason == "error"
    assert [d.tokens for d in done[1:]] == [d.tokens for d in expected[1:]]


@pytest.mark.parametrize("seed", [-1, -(2**63), 2**63, 2**64 - 1, 0])
def test_seeds_of_any_sign(seed: int) -> None:
    on = engine("near", depth=3, width=2)
    options: dict[str, Any] = {"temperature": 1.0, "seed": seed, "n": 2}
    first, second = (run(e, request(PROMPT, 10, **options)) for e in (on, engine()))
    assert [d.tokens for d in first] == [d.tokens for d in second]
    assert first[0].tokens != first[1].tokens


def test_choices_without_a_seed_differ_from_each_other_and_from_the_next_time() -> None:
    on = engine("near", depth=3)
    one = request(PROMPT, 10, n=4, temperature=1.0)
    texts = [tuple(d.tokens) for _ in range(2) for d in run(on, one)]
    assert len(set(texts)) == 8


def test_an_end_id_beyond_the_vocabulary_harms_nobody() -> None:
    on = engine()
    odd = request(PROMPT, 8, min_tokens=5, eos=[300, 300 + 7, 5])
    done = run(on, odd, request(PROMPT, 8))
    assert done[1].tokens == tokens(engine(), PROMPT, 8)
    assert done[0].error is None and 5 not in done[0].tokens[:5]


def test_a_draft_with_a_shorter_context_goes_on_beyond_it() -> None:
    from spec_serve.draft.standalone import StandaloneDrafter
    from spec_serve.kernels.reference import TorchAttention

    short = StandaloneDrafter(tiny_model(max_position_embeddings=32), TorchAttention(exact=True))
    on = engine("none", draft=short, depth=4, width=2)
    assert tokens(on, PROMPT, 60) == tokens(engine(), PROMPT, 60)
    assert on.stats().drafted > 0


def test_prediction_survives_preemption_and_is_counted() -> None:
    text = tuple(tokens(engine(), PROMPT, 30))
    on = engine("lookup", kv_tokens=90, max_rows=3, nodes=8)
    first = request(prompts(1, 24, 24, seed=2)[0], 30)
    told = request(PROMPT, 30, speculation=Speculation(prediction=text))
    done = run(on, first, told)[1]
    assert on.stats().preempted > 0
    assert done.tokens == list(text)
    assert done.usage.accepted_prediction_tokens > 12
    counted = [step.sources.get("prediction", (0, 0)) for step in done.steps]
    assert done.usage.accepted_prediction_tokens == sum(hits for _, hits in counted)
    assert done.usage.rejected_prediction_tokens == sum(n - hits for n, hits in counted)


def test_nothing_runnable_does_not_spin_and_stop_ends_all() -> None:
    on = engine("near", max_rows=1)
    steps = 0
    inner: Callable[[], list[Event]] = on.step

    def counted() -> list[Event]:
        nonlocal steps
        steps += 1
        return inner()

    on.step = counted  # type: ignore[method-assign]
    told: list[Event] = []
    thread = threading.Thread(target=on.run, args=(told.extend,))
    thread.start()
    time.sleep(0.1)
    assert steps == 0
    asked = [request(PROMPT, 900, n=2) for _ in range(3)]
    for one in asked:
        on.submit(one)
    while not any(isinstance(event, Delta) for event in list(told)):
        time.sleep(0.01)
    on.stop()
    thread.join(30)
    ends = [event for event in told if isinstance(event, Finished)]
    assert [event.reason for event in ends] == ["cancelled"] * 6
    assert on.idle() and on.stats().running == on.stats().waiting == 0
    on.store.check()


def test_started_comes_once_and_numbers_add_up_after_preemption() -> None:
    on = engine("near", lookup=True, depth=3, width=2, kv_tokens=120, max_rows=4)
    asked = [request(p, 25, n=2, temperature=0.7, seed=1) for p in prompts(3, 10, 30, seed=28)]
    for one in asked:
        on.submit(one)
    told = finish(on)
    stats = on.stats()
    assert stats.preempted > 0
    events = [event for one in asked for event in told[one.id]]
    assert sum(isinstance(event, Started) for event in events) == 6
    assert stats.prompt_tokens == sum(2 * len(one.prompt) for one in asked)
    started = [event.cached_tokens for event in events if isinstance(event, Started)]
    assert stats.prefix_hit_tokens == sum(started)
    deltas = [event for event in events if isinstance(event, Delta)]
    assert stats.tokens_out == sum(len(event.tokens) for event in deltas) == 150
    assert stats.drafted == sum(event.step.drafted for event in deltas)
    assert stats.accepted == sum(event.step.accepted for event in deltas)
    for one in asked:
        for index in range(2):
            mine = [e.step.step for e in deltas if e.request is one and e.index == index]
            assert mine == list(range(1, len(mine) + 1))


def test_nothing_is_kept_of_finished_requests() -> None:
    on = engine("near", lookup=True, depth=2)
    run(on, *(request(p, 4, n=2, temperature=1.0) for p in prompts(12)))
    assert not (on._live or on._inbox or on._timed or on._cancels or on._events or on._suspects)
    assert on.scheduler.running == on.scheduler.waiting == []
    assert target() is not None
