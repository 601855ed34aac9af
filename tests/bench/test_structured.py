"""The bench of structured output on a tiny model: what it finds valid, counts and refuses."""

from __future__ import annotations

import json

import pytest
from jsonschema import Draft202012Validator

from spec_serve.bench import structured
from spec_serve.bench.schemas import EXAMPLE, ORDER, made, orders
from spec_serve.bench.structured import Bench, compiling, fits, order, pace, validity
from tests.grammars import constrained, spelling


@pytest.fixture(scope="module")
def bench() -> Bench:
    return Bench(constrained("lookup", max_context=900, nodes=24), spelling())


def test_generated_schemas_are_varied_and_the_same_for_a_seed() -> None:
    asked = made()
    assert [one.schema for one in asked] == [one.schema for one in made(100, 1)]
    assert len({json.dumps(one.schema) for one in asked}) == 100
    assert made(100, 2)[0].schema != asked[0].schema
    every = json.dumps([one.schema for one in asked])
    for keyword in ("$ref", "enum", "const", "pattern", "format", "anyOf", "maxItems", "minimum"):
        assert f'"{keyword}"' in every
    for one in asked:
        Draft202012Validator.check_schema(one.schema)
    assert fits(json.dumps(EXAMPLE), ORDER) and not fits("{}", ORDER) and not fits("{", ORDER)
    assert len(set(orders(50))) == 50


def test_what_a_model_without_sense_writes_is_valid(bench: Bench) -> None:
    found = validity(bench, made(3, 3), (0.0, 1.0))
    assert found["wrong"] == [] and found["valid"] == found["finished"] >= 3
    assert found["answers"] == 6 and found["forced"] > 0.2 * found["tokens"]


def test_pace_and_order_tell_both_sides(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(structured, "SIX", {"choices": structured.SIX["choices"]})
    one, every = pace(bench, 2, most=24)
    assert one["grammar"] == "choices" and every["grammar"] == "ALL"
    assert one["with/without"] > 0 and one["forced"] > 0 and one["tokens"] == every["tokens"]
    found = order(bench, 1, tries=1)
    assert found["forced valid"] == 1 and found["retried valid"] == 0 and found["tries"] == 1
    assert found["ratio"] == pytest.approx(found["retried s"] / found["forced s"])


def test_compiling_counts_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = {"very deep": structured.HOSTILE["very deep"]}
    monkeypatch.setattr(structured, "HOSTILE", hostile)
    found = compiling(spelling(), ['{"type":"string"}', '{"uniqueItems":true}'])
    assert found["schemas"] == 2 and found["refused"] == 1
    assert found["hostile"]["very deep"].startswith("refused in ")
