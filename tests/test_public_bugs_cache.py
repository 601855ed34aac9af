"""Faults users of other servers met, each impossible here: cache, context and life (22 to 28).

The numbers are those of the project's list of public bug reports; what is emitted, cases 2 to 15
and 29, stands in tests/test_public_bugs.py.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from spec_serve.spec.completion import Completion
from spec_serve.spec.request import RequestError, Speculation
from tests.engines import (
    PROMPT,
    engine,
    prompts,
    reference,
    request,
    run,
    tokens,
    unique,
)
from tests.tiny import VOCAB, tiny_model


@pytest.mark.parametrize("ending", ["length", "stop id", "eos", "watch"])
def test_case_22_the_tree_holds_only_what_was_returned(ending: str) -> None:
    class Cut:
        """Stops after the 9th token of the choice."""

        def __init__(self) -> None:
            self.seen = 0

        def feed(self, new: Sequence[int], active_from: int) -> tuple[int, str] | None:
            self.seen += len(new)
            over = self.seen - 9
            return None if over < 0 else (len(new) - over, "cut")

    prompt = prompts(1, 40, 40, seed=8)[0]
    ids = tokens(engine(), prompt, 13)
    at = unique(7, ids)
    on = engine("self", depth=8, width=3, nodes=32)
    options: dict[str, object] = {
        "length": {},
        "stop id": {"stop_ids": [ids[at]]},
        "eos": {"eos": [ids[at]]},
        "watch": {"watch": Cut},
    }[ending]  # type: ignore[assignment]
    (first,) = run(on, request(prompt, 13, **options))  # type: ignore[arg-type]
    kept = prompt + first.tokens
    assert len(first.tokens) == {"length": 13, "watch": 9}.get(ending, at + 1)
    books = on.store.books()
    assert books.evictable <= len(kept) and books.pinned == books.rows == books.granted == 0
    second = kept + [11, 12, 13, 14, 15]
    (done,) = run(on, request(second, 12))
    assert len(kept) - 1 <= done.usage.cached_tokens <= len(kept)
    assert done.tokens == tokens(engine(), second, 12)


def accepted_share(done: Completion) -> float:
    drafted = sum(step.drafted for step in done.steps[:-1])
    return sum(step.accepted for step in done.steps[:-1]) / drafted


def test_case_23_a_cache_hit_never_lowers_acceptance() -> None:
    a, b, c = prompts(3, 200, 220, seed=9)
    off_once = request(a, 40, speculation=Speculation(mode="off"))
    for kind in ("self", "near"):
        on = engine(kind, depth=4)
        expected = tokens(engine(), a, 40)
        shares = []
        for _ in range(4):
            (done,) = run(on, request(a, 40))
            assert done.tokens == expected
            shares.append(accepted_share(done))
        batch = run(on, *(request(p, 40) for p in (a, b, a, c, a)))
        shares += [accepted_share(batch[i]) for i in (0, 2, 4)]
        run(on, off_once)
        shares.append(accepted_share(run(on, request(a, 40))[0]))
        on.store.clear()
        run(on, off_once)  # now the tree holds A without any K/V of the draft
        (done,) = run(on, request(a, 40))
        assert done.usage.cached_tokens >= len(a) - 1
        shares.append(accepted_share(done))
        if kind == "self":
            assert shares == [1.0] * len(shares)
        else:
            assert 0.02 < shares[0] < 1.0
            assert shares == pytest.approx([shares[0]] * len(shares), abs=0.02)


@pytest.mark.parametrize("kind", ["second", "third"])
@pytest.mark.parametrize("width", [2, 3, 4])
def test_case_24_accepted_nodes_scattered_over_the_tree(kind: str, width: int) -> None:
    batch = prompts(6, 10, 40, seed=10)
    expected = [tokens(engine(), prompt, 30) for prompt in batch]
    for depth in (1, 4):
        on = engine(kind, depth=depth, width=width, nodes=48)
        done = run(on, *(request(prompt, 30) for prompt in batch))
        assert [one.tokens for one in done] == expected
        steps = [step for one in done for step in one.steps]
        if width >= (2 if kind == "second" else 3):
            assert sum(step.accepted for step in steps) > len(steps) * 0.5
        again = [prompt + ids + [3, 4] for prompt, ids in zip(batch[:2], expected, strict=False)]
        second = run(on, *(request(prompt, 20) for prompt in again))
        assert [one.tokens for one in second] == [tokens(engine(), p, 20) for p in again]


@pytest.mark.parametrize("kind", ["self", "near", "far"])
@pytest.mark.parametrize("shape", [(1, 1), (5, 1), (1, 4), (5, 4)], ids=str)
def test_case_25_books_balance_in_a_tight_pool(kind: str, shape: tuple[int, int]) -> None:
    chooser = random.Random(25)
    on = engine(kind, depth=shape[0], width=shape[1], nodes=24, kv_tokens=400, max_rows=4)
    live: list[str] = []
    for i in range(40):
        prompt = [chooser.randrange(VOCAB) for _ in range(chooser.randint(1, 120))]
        asked = request(prompt, chooser.randint(1, 16))
        if i % 20 == 7:
            with pytest.raises(RequestError):
                on.submit(request([VOCAB + 1], 3))
        on.submit(asked)
        live.append(asked.id)
        if i % 10 == 4:
            on.cancel(chooser.choice(live))
        on.step()
        on.store.check()
    while not on.idle():
        on.step()
        on.store.check()
    books = on.store.books()
    assert books.free + books.evictable == books.total
    assert books.pinned == books.rows == books.granted == 0
    on.store.clear()
    assert on.store.books().free == books.total


def test_case_26_nodes_in_use_are_never_evicted() -> None:
    chooser = random.Random(26)
    shared = [chooser.randrange(VOCAB) for _ in range(100)]
    for cancel in (False, True):
        on = engine("near", depth=3, width=2, kv_tokens=256, max_rows=2)
        a = request(shared + list(range(10)), 80)
        expected = tokens(engine(), a.prompt, 80)
        on.submit(a)
        got: list[int] = []
        for i in range(24):
            prompt = [chooser.randrange(VOCAB) for _ in range(80)]
            if i % 4 == 0:
                prompt = shared[:50] + prompt[:30]
            other = request(prompt, 6)
            on.submit(other)
            theirs: list[int] = []
            for _ in range(4):
                for event in on.step():
                    into = got if event.request is a else theirs
                    into += getattr(event, "tokens", [])
                on.store.check()
            if cancel and i == 3:
                on.cancel(a.id)
        while not on.idle():
            for event in on.step():
                if event.request is a:
                    got += getattr(event, "tokens", [])
        assert got == expected if not cancel else got == expected[: len(got)]
        books = on.store.books()
        assert books.pinned == 0
        on.store.clear()
        assert on.store.books().free == 256


def test_case_27_guesses_end_where_the_context_ends() -> None:
    model = tiny_model(max_position_embeddings=64)
    chooser = random.Random(27)
    for kind in ("near",):
        on = engine(kind, model=model, depth=8, width=2, nodes=24)
        plain = engine(model=model)
        for length in range(50, 64):
            prompt = [chooser.randrange(VOCAB) for _ in range(length)]
            for limit in (1, 2, 14, 1000):
                (done,) = run(on, request(prompt, limit))
                assert done.tokens == tokens(plain, prompt, limit)
                assert done.reason == "length"
                assert len(done.tokens) == min(limit, 64 - length)
        batch = [
            request([chooser.randrange(VOCAB) for _ in range(length)], 1000)
            for length in range(50, 57)
        ]
        short = request([1, 2, 3], 20)
        done = run(on, *batch, short)
        assert [len(one.tokens) + len(one.request.prompt) for one in done[:-1]] == [64] * 7
        assert done[-1].tokens == tokens(plain, [1, 2, 3], 20)
        assert sum(step.drafted for step in done[-1].steps) > 0
        for length in (64, 65):
            with pytest.raises(RequestError, match=rf"{length} tokens.*64") as caught:
                on.submit(request([1] * length, 4))
            assert caught.value.code == "context_length_exceeded"


def test_case_28_cancelled_rows_are_gone_by_the_next_step() -> None:
    chooser = random.Random(28)
    on = engine("near", lookup=True, depth=3, width=2, max_rows=4, kv_tokens=2000, step_tokens=64)
    asked = [
        request([chooser.randrange(VOCAB) for _ in range(chooser.randint(5, 400))], 400,
                ignore_eos=True, n=chooser.choice((1, 1, 2)))
        for _ in range(40)
    ]  # fmt: skip
    for one in asked:
        on.submit(one)
    ends: Counter[str] = Counter()
    order = list(asked)
    chooser.shuffle(order)
    for one in order:
        for _ in range(chooser.randint(0, 2)):
            on.step()
        on.cancel(one.id)
        for event in on.step():
            if hasattr(event, "reason"):
                assert event.reason == "cancelled"
                ends[event.request.id] += 1
        on.store.check()
    assert on.idle()
    stats = on.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    assert stats.aborted == sum(one.n for one in asked)
    books = on.store.books()
    assert books.free + books.evictable == books.total
    assert tokens(on, PROMPT, 20) == reference(40)[:20]
