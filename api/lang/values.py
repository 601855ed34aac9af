"""Types of values: the constraint a type means for the model, and the value read off its text.

Constraints have the form of a request's `constraint`. A class is known by its name, so that a
graph can be saved without code and be given its classes when loaded. Knows no server.
"""

from __future__ import annotations

import dataclasses
import datetime
import enum
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args, get_origin

import msgspec

_DATE = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
_REGEX: dict[Any, tuple[str, str]] = {
    int: ("int", r"-?(0|[1-9][0-9]{0,17})"),
    float: ("float", r"-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,17})?"),
    bool: ("bool", r"true|false"),
    datetime.date: ("date", _DATE),
    datetime.datetime: ("datetime", _DATE + r"T([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]"),
}
_PARSE: dict[str, Callable[[str], Any]] = {
    "text": str,
    "int": int,
    "float": float,
    "bool": lambda text: {"true": True, "false": False}[text],
    "date": datetime.date.fromisoformat,
    "datetime": datetime.datetime.fromisoformat,
    "json": json.loads,
}


class ValueParseError(ValueError):
    """What the model wrote isn't a value of the type; `text` is what it wrote."""

    def __init__(self, told: str, text: str) -> None:
        super().__init__(told)
        self.text = text


@dataclass(frozen=True, slots=True)
class Shape:
    """constraint: None = free text. parse: name of the reader; types: classes it needs by name."""

    constraint: dict[str, Any] | None = None
    parse: str = "text"
    types: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def shape(
    *,
    type: Any = None,
    regex: str | None = None,
    schema: Any = None,
    choices: Sequence[str] | None = None,
    grammar: str | None = None,
) -> Shape:
    """Of at most one of them. Raises TypeError, ValueError."""
    given = [part for part in (type, regex, schema, choices, grammar) if part is not None]
    if len(given) > 1:
        raise ValueError("gen: at most one of type, regex, schema, choices and grammar")
    if regex is not None:
        re.compile(regex)
        return Shape({"kind": "regex", "source": regex})
    if choices is not None:
        held = list(choices)
        if not held or not all(isinstance(choice, str) and choice for choice in held):
            raise ValueError("gen: choices must be texts, and at least one")
        return Shape(_choices(held))
    if grammar is not None:
        kind = "name" if re.fullmatch(r"[a-z][a-z0-9_-]*", grammar) else "lark"
        return Shape({"kind": kind, "source": grammar})
    if schema is not None:
        if isinstance(schema, dict):
            return Shape(_schema(schema), "json")
        return _of_class(schema)
    return Shape() if type is None else _of_type(type)


def _of_type(kind: Any) -> Shape:
    if kind is str:
        return Shape()
    if kind in _REGEX:
        name, regex = _REGEX[kind]
        return Shape({"kind": "regex", "source": regex}, name)
    if get_origin(kind) is Literal:
        options = get_args(kind)
        if not all(isinstance(option, str) for option in options):
            raise TypeError("gen: only a Literal of texts can be generated")
        return Shape(_choices(list(options)))
    if isinstance(kind, enum.EnumMeta):
        members: list[Any] = list(kind)
        texts = [str(member.value) for member in members]
        return Shape(_choices(texts), f"enum:{kind.__name__}", {kind.__name__: kind})
    return _of_class(kind)


def _of_class(kind: Any) -> Shape:
    """A dataclass, msgspec.Struct, pydantic model, or what msgspec knows a schema of."""
    name = getattr(kind, "__name__", str(kind))
    if hasattr(kind, "model_json_schema"):  # pydantic, which need not be installed
        schema = kind.model_json_schema()
    else:
        try:
            schema = msgspec.json.schema(kind)
        except TypeError as error:
            raise TypeError(f"gen: {name} is no type that can be generated: {error}") from None
    closed = _closed(_without_reference(schema))
    return Shape(_schema(closed), f"class:{name}", {name: kind})


def _closed(schema: Any) -> Any:
    """No properties but those of the class: others would be generated for nothing."""
    if isinstance(schema, list):
        return [_closed(one) for one in schema]
    if not isinstance(schema, dict):
        return schema
    made = {name: _closed(one) for name, one in schema.items()}
    if made.get("type") == "object" and isinstance(made.get("properties"), dict):
        made.setdefault("additionalProperties", False)
    return made


def _choices(texts: list[str]) -> dict[str, Any]:
    return {"kind": "choices", "source": json.dumps(texts, ensure_ascii=False)}


def _schema(schema: dict[str, Any]) -> dict[str, Any]:
    return {"kind": "json_schema", "source": json.dumps(schema, ensure_ascii=False)}


def _without_reference(schema: dict[str, Any]) -> dict[str, Any]:
    """msgspec puts a class's schema behind a reference; at the top that only hides it."""
    reference = schema.get("$ref", "")
    held: dict[str, Any] = schema.get("$defs", {})
    found = held.get(reference.removeprefix("#/$defs/"))
    if found is None:
        return schema
    inner = json.dumps(found)
    return {**found, "$defs": held} if "#/$defs/" in inner else dict(found)


def read(parse: str, text: str, types: Mapping[str, Any]) -> Any:
    """The value of a text, as plain data where its class is not there. Raises ValueParseError."""
    kind, _, name = parse.partition(":")
    if name and name not in types:
        kind, parse = "", "text" if kind == "enum" else "json"
    elif name:
        made = types[name]
    try:
        if kind == "enum":
            return next(member for member in made if str(member.value) == text)
        if kind == "class":
            if hasattr(made, "model_validate_json"):
                return made.model_validate_json(text)
            return msgspec.json.decode(text, type=made)
        return _PARSE[parse](text)
    except (ValueError, KeyError, StopIteration, msgspec.MsgspecError) as error:
        told = f"the model's text is no {name or kind}: {error}"
        raise ValueParseError(told, text) from None


def written(value: Any) -> str:
    """A value as text of a prompt. Raises TypeError for what has no one way to be written."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return str(value)
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, enum.Enum):
        return str(value.value)
    if dataclasses.is_dataclass(value) or isinstance(value, msgspec.Struct | dict | list):
        return msgspec.json.encode(value).decode()
    if hasattr(value, "model_dump_json"):
        return str(value.model_dump_json())
    raise TypeError(f"a {type(value).__name__} can't be written into a prompt; make it text")
