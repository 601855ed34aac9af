"""JSON-Schema-Test-Suite (draft 2020-12): nothing invalid is accepted; what is refused is listed.

The two lists in tests/data/json_schema_known.json may only shrink: groups that are refused, and
groups of which a valid instance is rejected. Instances are written as Python's json does, compact.
"""

from __future__ import annotations

import json
import random
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jsonschema import Draft202012Validator

from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.constraint import Walk
from spec_serve.spec.grammar import Grammar
from spec_serve.spec.request import Constraint, RequestError
from tests.grammars import spelling

DATA = Path(__file__).parents[1] / "data"
SUITE = sorted((DATA / "json_schema_test_suite").glob("*.json"))
ENDS = tuple(sorted(spelling().eos_ids))
KNOWN = json.loads((DATA / "json_schema_known.json").read_text())


def accepts(grammar: Grammar, instance: Any) -> bool:
    written = json.dumps(instance, separators=(",", ":"), ensure_ascii=False)
    matcher = grammar.start()
    return all(map(matcher.advance, spelling().encode(written))) and matcher.complete


@cache
def judged(path: Path) -> dict[str, str]:
    """Group -> exact, refused, rejects (a valid one) or accepts (an invalid one)."""
    found = {}
    for group in json.loads(path.read_text()):
        source = json.dumps(group["schema"])
        verdict = "exact"
        try:
            asked = Constraint("json_schema", source, whitespace="compact")
            grammar = compiler_of(spelling()).compile(asked).grammar
        except RequestError as error:
            assert str(error).removeprefix("constraint: "), "a refusal says why"
            verdict = "refused"
        else:
            assert grammar.ignored == ()
            for test in group["tests"]:
                if accepts(grammar, test["data"]) != test["valid"]:
                    verdict = "rejects" if test["valid"] else "accepts"
                    if verdict == "accepts":
                        break
        found[f"{path.stem}: {group['description']}"] = verdict
    return found


@pytest.mark.parametrize("path", SUITE, ids=lambda path: path.stem)
def test_the_suite(path: Path) -> None:
    found = judged(path)
    assert [name for name, verdict in found.items() if verdict == "accepts"] == []
    for verdict in ("refused", "rejects"):
        own = {name for name, said in found.items() if said == verdict}
        assert own <= set(KNOWN[verdict]), "grew"


def test_whatever_masks_let_through_is_valid() -> None:
    """Random walks through masks, as a model without sense would go: finished means valid."""
    chance = random.Random(1)
    finished = 0
    for group in [group for path in SUITE for group in json.loads(path.read_text())]:
        if "\\\\p{" in json.dumps(group["schema"]):
            continue  # Python's regular expressions don't know it
        asked = Constraint("json_schema", json.dumps(group["schema"]))
        try:
            compiled = compiler_of(spelling()).compile(asked)
        except RequestError:
            continue
        for _ in range(2):
            walk = Walk(compiled, ENDS)
            while not walk.over and len(walk.tokens) < 60:
                (mask,) = walk.masks(())
                assert mask is not None
                may = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                end = [int(i) for i in may if i in ENDS]
                walk.take([end[0] if end else int(chance.choice(may))])
            if walk.over and walk.complete:
                finished += 1
                told = b"".join(map(spelling().token_bytes, walk.tokens))
                value = json.loads(told)
                assert Draft202012Validator(group["schema"]).is_valid(value), told
                assert walk.outcome(False).schema_valid is True
    assert finished > 150


def test_what_is_known_still_holds() -> None:
    """A list that could shrink is shrunk."""
    every = {name: said for path in SUITE for name, said in judged(path).items()}
    for verdict in ("refused", "rejects"):
        assert [name for name in KNOWN[verdict] if every[name] != verdict] == []
    assert len(every) > 350
