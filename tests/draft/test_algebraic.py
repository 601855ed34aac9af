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
