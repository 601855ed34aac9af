"""Types of values: what they ask of the model, and what is read off its text."""

from __future__ import annotations

import datetime
import enum
import json
import re
from dataclasses import dataclass
from typing import Any, Literal

import msgspec
import pytest

import spec_serve.lang as ss
from spec_serve.api import messages as m
from spec_serve.lang.parts import GenPart
from spec_serve.lang.values import read, written


class Level(enum.Enum):
    LOW = "low"
    HIGH = 2


@dataclass
class Place:
    name: str
    floor: int


class Ticket(msgspec.Struct):
    where: Place
    urgent: bool


class Modelled:
    """As pydantic's models are."""

    @classmethod
    def model_json_schema(cls) -> dict[str, Any]:
        return {"type": "object", "properties": {"a": {"type": "integer"}}}

    @classmethod
    def model_validate_json(cls, text: str) -> Any:
        return ("modelled", json.loads(text))


@pytest.mark.parametrize(
    ("kind", "good", "bad", "value"),
    [
        (int, "-12", "1.5", -12),
        (float, "2.50", "x", 2.5),
        (bool, "true", "yes", True),
        (datetime.date, "2024-02-29", "2024-02-30", datetime.date(2024, 2, 29)),
        (datetime.datetime, "2024-02-29T23:59:00", "now", datetime.datetime(2024, 2, 29, 23, 59)),
        (Level, "2", "3", Level.HIGH),
        (Place, '{"name":"a","floor":1}', '{"name":"a"}', Place("a", 1)),
        (
            Ticket, '{"where":{"name":"a","floor":1},"urgent":true}', "{}",
            Ticket(Place("a", 1), True),
        ),
        (Modelled, '{"a":1}', "{", ("modelled", {"a": 1})),
    ],
)  # fmt: skip
def test_types(kind: Any, good: str, bad: str, value: Any) -> None:
    part = ss.gen("x", type=kind)
    constraint = part.options["constraint"]
    m.generate({"gen": "g", "prompt": "p", "constraint": constraint})
    shape = part.shape
    assert read(shape.parse, good, shape.types) == value
    with pytest.raises(ss.ValueParseError) as found:
        read(shape.parse, bad, shape.types)
    assert found.value.text == bad
    if constraint["kind"] == "regex":
        assert re.fullmatch(constraint["source"], good)
    if kind is Ticket:
        schema = json.loads(constraint["source"])
        assert schema["required"] == ["where", "urgent"] and "$defs" in schema


def constraint(part: GenPart) -> Any:
    return part.options.get("constraint")


def test_constraints_have_the_requests_form() -> None:
    assert constraint(ss.gen()) is None and constraint(ss.gen(type=str)) is None
    literal = ss.gen(type=Literal["a", "é"])
    assert constraint(literal) == {"kind": "choices", "source": '["a", "é"]'}
    assert constraint(ss.gen(regex="a+")) == {"kind": "regex", "source": "a+"}
    assert constraint(ss.gen(grammar="sql")) == {"kind": "name", "source": "sql"}
    assert constraint(ss.gen(grammar='start: "a"'))["kind"] == "lark"
    schema = ss.gen(schema={"type": "object"}, whitespace="compact", strict=False)
    assert constraint(schema) == {
        "kind": "json_schema", "source": '{"type": "object"}', "whitespace": "compact",
        "strict": False,
    }  # fmt: skip
    assert read(schema.shape.parse, '{"a": [1]}', {}) == {"a": [1]}
    assert constraint(ss.gen(max_chars=9)) == {"kind": "text", "max_chars": 9}


def test_what_there_is_not_is_refused() -> None:
    with pytest.raises(TypeError, match="no option 'max_token'"):
        ss.gen(max_token=4)
    with pytest.raises(ValueError, match="at most one"):
        ss.gen(type=int, regex="a")
    with pytest.raises(TypeError, match="Literal of texts"):
        ss.gen(type=Literal[1, 2])
    with pytest.raises(TypeError, match="no type that can be generated"):
        ss.gen(type=re.Pattern)
    with pytest.raises(ValueError, match="stands there twice"):
        ss.select("x", ["a", "a"])
    with pytest.raises(ValueError, match="rule must be one of"):
        ss.select("x", ["a"], rule="best")  # type: ignore[arg-type]


def test_values_are_written_in_one_way() -> None:
    values = [True, 3, "a", datetime.date(2024, 1, 2), Level.LOW, Place("a", 1), [1, "b"]]
    texts = ["true", "3", "a", "2024-01-02", "low", '{"name":"a","floor":1}', '[1,"b"]']
    assert [written(value) for value in values] == texts
    with pytest.raises(TypeError, match="object can't be written"):
        written(object())
