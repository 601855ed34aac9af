"""Heads in the engine: text with any head equals text without, and a cache hit costs no acceptance.

Random heads are nearly always wrong, so every step throws guesses away; heads that are always
right are in test_algebraic.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Drafter, Noise, Plan, Seen, Trees
from spec_serve.spec.request import Request, Speculation
from tests.draft.heads import for_target
from tests.engines import engine, prompts, request, run, target, tokens


class Recorder:
    """Passes everything on and keeps the trees by the number of tokens they hang below."""

    def __init__(self, inner: Drafter) -> None:
        self.inner = inner
        self.name = inner.name
        self.kv_specs: tuple[KVSpec, ...] = inner.kv_specs
        self.taps: tuple[int, ...] = inner.taps
        self.trees: dict[int, tuple[Tensor, Tensor, Tensor]] = {}

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        self.inner.bind(layers, table)

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        made = self.inner.propose(seen, grants, plan, noise)
        if made is not None:
            for b, length in enumerate(seen.length.tolist()):
                self.trees[length] = (made.tokens[b], made.parents[b], made.score[b])
        return made


@cache
def drafter(kind: str) -> Drafter:
    return for_target(kind, target())


@cache
def alone() -> tuple[list[int], ...]:
    """What each of the requests yields by itself, without drafts."""
    return tuple(run(engine(), one)[0].tokens for one in asked())


def asked() -> list[Request]:
    options: list[dict[str, Any]] = [
        {}, {"temperature": 0.9, "seed": 4, "top_p": 0.9}, {"repetition_penalty": 1.3},
        {"speculation": Speculation(mode="off")},
    ]  # fmt: skip
    texts = prompts(4, 3, 40, seed=8)
    return [request(text, 10, **more) for text, more in zip(texts, options, strict=True)]


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        ("eagle", (4, 1)),
        ("eagle3", (3, 3)),
        ("eagle3", (1, 1)),
        ("nextn", (3, 2)),
        ("dflash", (3, 3)),
        ("p-eagle", (4, 2)),
        ("modules", (4, 2)),
    ],
)
def test_text_with_a_head_is_text_without(kind: str, shape: tuple[int, int]) -> None:
    on = engine("none", draft=drafter(kind), depth=shape[0], width=shape[1], lookup=True)
    assert [done.tokens for done in run(on, *asked())] == list(alone()), "cold"
    assert [done.tokens for done in run(on, *asked())] == list(alone()), "cached"
    assert on.stats().drafted > 0


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "modules"])
def test_a_cache_hit_changes_no_guess(kind: str) -> None:
    recorder = Recorder(drafter(kind))
    on = engine("none", draft=recorder, depth=3, width=2, step_tokens=16)
    prompt = prompts(1, 24, 24, seed=9)[0]
    said = tokens(on, prompt, 12)
    cold, recorder.trees = recorder.trees, {}
    assert tokens(on, prompt, 12) == said
    same(cold, recorder.trees, 8)
    # A row without speculation is seen by the head all the same.
    on = engine("none", draft=recorder, depth=3, width=2)
    assert run(on, request(prompt, 12, speculation=Speculation(mode="off")))[0].tokens == said
    recorder.trees = {}
    assert tokens(on, prompt, 12) == said
    same(cold, recorder.trees, 8)
    turn = [*prompt, *said, *prompts(1, 12, 12, seed=10)[0]]
    recorder.trees = {}
    (done,) = run(on, request(turn, 8))
    assert done.usage.cached_tokens >= len(prompt) + len(said) - 2
    warm, recorder.trees = recorder.trees, {}
    tokens(engine("none", draft=recorder, depth=3, width=2), turn, 8)
    same(warm, recorder.trees, 6)


@pytest.mark.parametrize("kind", ["eagle3", "dflash", "p-eagle", "modules"])
def test_guesses_may_reach_beyond_the_context(kind: str) -> None:
    prompt = prompts(1, 16, 16, seed=12)[0]
    said = tokens(engine(max_context=len(prompt) + 6), prompt, 6)
    on = engine("none", draft=drafter(kind), depth=4, width=2, max_context=len(prompt) + 6)
    assert tokens(on, prompt, 6) == said and len(said) == 6


def same(
    one: dict[int, tuple[Tensor, Tensor, Tensor]],
    other: dict[int, tuple[Tensor, Tensor, Tensor]],
    least: int,
) -> None:
    common = one.keys() & other.keys()
    assert len(common) >= least
    for length in common:
        for a, b in zip(one[length][:2], other[length][:2], strict=True):
            assert a.tolist() == b.tolist(), length
        torch.testing.assert_close(one[length][2], other[length][2], atol=1e-5, rtol=0)
