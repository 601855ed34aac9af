"""Speculation changes no token of constrained text: on equals off for every grammar and draft.

As tests/test_lossless.py. The tiny model has no sense, so its text is as adversarial as it gets:
what is valid here is valid because of the masks.
"""

from __future__ import annotations

from functools import cache

import pytest

from spec_serve.spec.request import Constrained
from tests.engines import prompts, request, run
from tests.grammars import SIX, constrained, spelling

DRAFTS = ("lookup", "self", "near", "far", "second", "third")
PROMPT = prompts(1, 20, 24, seed=5)[0]
EOS = tuple(sorted(spelling().eos_ids))
MOST = 64
Told = tuple[list[int], str, Constrained | None]


@cache
def off(name: str, temperature: float, seed: int) -> Told:
    asked = request(PROMPT, MOST, constraint=SIX[name], temperature=temperature, seed=seed, eos=EOS)
    (done,) = run(constrained(), asked)
    assert done.error is None, done.error
    assert all(step.drafted == 0 for step in done.steps)
    return done.tokens, done.reason, done.constraint


@pytest.mark.parametrize("kind", DRAFTS)
def test_case_17_every_grammar_and_draft_yields_the_tokens_of_off(kind: str) -> None:
    """All grammars side by side, each row with its own; OFF answers each alone."""
    for temperature, shape in ((0.0, (3, 3)), (1.0, (6, 1))):
        on = constrained(kind, depth=shape[0], width=shape[1])
        for how in ("cold", "cached")[: 1 + (temperature > 0)]:
            asked = [
                request(PROMPT, MOST, constraint=made, temperature=temperature, seed=1, eos=EOS)
                for made in SIX.values()
            ]
            for name, done in zip(SIX, run(on, *asked), strict=True):
                assert done.error is None, done.error
                told = (done.tokens, done.reason, done.constraint)
                assert told == off(name, temperature, 1), (name, how)
