"""What tests of constraints share: a walk, its tokens, trees made by hand, and no hurry."""

from __future__ import annotations

import pytest

from spec_serve.draft.mix import Candidates
from spec_serve.spec import constraint as constraint_module
from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.constraint import Walk
from spec_serve.spec.request import Constraint
from tests.engines import prompts
from tests.grammars import spelling

EOS = tuple(sorted(spelling().eos_ids))
PROMPT = prompts(1, 20, 24, seed=5)[0]
ORDER = '{"name_of_person":"Zoe","tags":["red","blue"],"place":{"x":12}}'


@pytest.fixture(autouse=True)
def no_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is looked at must not depend on how busy this machine is."""
    monkeypatch.setattr(constraint_module, "WITHIN_S", 60.0)


def walk(constraint: Constraint) -> Walk:
    return Walk(compiler_of(spelling()).compile(constraint), EOS)


def ids(string: str) -> list[int]:
    return spelling().encode(string)


def tree(paths: list[list[int]]) -> Candidates:
    made = Candidates()
    for path in paths:
        at = -1
        for token in path:
            at = made.put(at, token, 0.9, "test")
    made.settle()
    return made
