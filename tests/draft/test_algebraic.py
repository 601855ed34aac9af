"""Heads whose acceptance is known beforehand, in the engine.

A pair's halves the wrong way round, a pairing that is off by one, a norm or a feedback missing:
each turns "accepts all" into "accepts nothing".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spec_serve.draft.base import Drafter
from spec_serve.draft.feature import FeatureDrafter
from spec_serve.spec.completion import Completion
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowNoise, RowSampling
from tests.draft.algebraic import EYE, NONE, PROMPT, V, eagle, eagle3, nextn, successor, target
from tests.engines import engine, request, run

DEPTH = 3


def said(draft: Drafter, tokens: int = 16) -> Completion:
    on = engine("none", model=target(), draft=draft, depth=DEPTH)
    (done,) = run(on, request(PROMPT, tokens))
    expected, at = [], PROMPT[-1]
    for _ in range(tokens):
        at = int(successor()[at])
        expected.append(at)
    assert done.tokens == expected
    return done


def accepted(draft: Drafter) -> list[int]:
    """Guesses accepted in every step that had as many as it could have."""
    full = [step for step in said(draft).steps if step.drafted == DEPTH]
    assert full
    return [step.accepted for step in full]


@pytest.mark.parametrize("made", [eagle, nextn(False)], ids=["eagle", "embedding first"])
def test_the_embedding_half_comes_first(made: Callable[[Tensor, Tensor], FeatureDrafter]) -> None:
    assert set(accepted(made(EYE, NONE))) == {DEPTH}
    assert set(accepted(made(NONE, EYE))) == {0}


def test_the_hidden_half_comes_first_in_mimo() -> None:
    assert set(accepted(nextn(True)(NONE, EYE))) == {DEPTH}
    assert set(accepted(nextn(True)(EYE, NONE))) == {0}


@pytest.mark.parametrize("capture", range(3))
@pytest.mark.parametrize("options", [{}, {"norm_output": True}, {"norm_before_residual": True}])
def test_eagle3_reads_each_capture_and_its_own_feedback(
    capture: int, options: dict[str, Any]
) -> None:
    assert set(accepted(eagle3(capture, **options))) == {DEPTH}


def test_eagle3_stops_where_its_vocabulary_ends() -> None:
    told = said(eagle3(1)).tokens
    missing = told[7]
    ids = torch.tensor([token for token in range(V) if token != missing])
    done = said(eagle3(1, ids))
    place = 0
    for step in done.steps:
        place += step.accepted + 1
        if step.drafted == DEPTH:
            left = 7 - (place - step.accepted - 1)  # guesses until the missing one
            assert step.accepted == (left if 0 <= left < DEPTH else DEPTH)


def test_guesses_are_drawn_with_the_targets_own_noise() -> None:
    # At this temperature pi(x) is drawn after x about every other time.
    on = engine("none", model=target(), draft=eagle(EYE, NONE), depth=DEPTH)
    (done,) = run(on, request(PROMPT, 30, temperature=16.0, seed=3))
    following = [int(successor()[token]) for token in (PROMPT[-1], *done.tokens[:-1])]
    assert 5 < sum(a == b for a, b in zip(done.tokens, following, strict=True)) < 25
    assert all(step.accepted == step.drafted for step in done.steps[:-1])
    plain = engine("none", model=target())
    asked = request(PROMPT, 30, temperature=16.0, seed=3)
    assert run(plain, asked)[0].tokens == done.tokens


def test_a_reduced_vocabulary_keeps_each_tokens_noise() -> None:
    rows = [
        RowSampling(Sampling(temperature=t, seed=9), 5, V, [1], 0, frozenset()) for t in (0.0, 0.8)
    ]
    noise = RowNoise(rows, "cpu")
    logits = torch.randn(2, V, generator=torch.Generator().manual_seed(1))
    ids = torch.tensor([0, 3, 4, 19, 47])
    at, places = torch.tensor([0, 1]), torch.tensor([8, 11])
    whole = noise.add(logits, at, places)
    assert not torch.equal(whole[1], logits[1])
    few = noise.add(logits[:, ids], at, places, ids)
    assert torch.equal(few[0], logits[0, ids])
    # Each is relative to its row's own maximum.
    torch.testing.assert_close(few - few[:, :1], whole[:, ids] - whole[:, :1])
