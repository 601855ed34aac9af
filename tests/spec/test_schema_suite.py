"""JSON-Schema-Test-Suite (draft 2020-12): nothing invalid is accepted; what is refused is listed.

The two lists in tests/data/json_schema_known.json may only shrink: groups that are refused, and
groups of which a valid instance is rejected. Instances are written as Python's json does, compact.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.grammar import Grammar
from spec_serve.spec.request import Constraint, RequestError
from tests.grammars import spelling

DATA = Path(__file__).parents[1] / "data"
SUITE = sorted((DATA / "json_schema_test_suite").glob("*.json"))
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


def test_what_is_known_still_holds() -> None:
    """A list that could shrink is shrunk."""
    every = {name: said for path in SUITE for name, said in judged(path).items()}
    for verdict in ("refused", "rejects"):
        assert [name for name in KNOWN[verdict] if every[name] != verdict] == []
    assert len(every) > 350
