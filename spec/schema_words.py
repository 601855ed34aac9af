"""Keywords of JSON Schema said in plainer ones, and where in a schema one stands.

What llguidance can't enforce as it is written can often be written otherwise, exactly: counts with
a decimal point, `contains` that any item fulfils, `not` of everything or of another `not`, anchors
of a schema without parts of other names. Nothing here changes what a schema means. Knows schemas
only.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

BY_NAME = frozenset({"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"})
DATA = frozenset({"const", "enum", "default", "examples"})  # keywords that hold values
_COUNTS = ("maxItems", "minItems", "maxLength", "minLength", "maxProperties", "minProperties",
           "minContains", "maxContains")  # fmt: skip
_TYPES = ("null", "boolean", "number", "string", "object", "array")


def counted(schema: dict[str, Any]) -> dict[str, Any]:
    """Counts as whole numbers: 2.0 is 2."""
    made = dict(schema)
    for name in _COUNTS:
        value = made.get(name)
        if isinstance(value, float) and value.is_integer():
            made[name] = int(value)
    return made


def negated(schema: dict[str, Any]) -> Any:
    """The same schema without `not` of what is always or never so, or of another `not`."""
    inner = schema.get("not")
    if inner is True or inner == {}:
        return False
    rest = {name: value for name, value in schema.items() if name != "not"}
    if isinstance(inner, dict) and inner.keys() == {"not"}:
        double = inner["not"]
        if not rest:
            return double
        return {**rest, "allOf": [*rest.get("allOf", ()), double]}
    return schema


def contained(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without `contains` that nothing or everything fulfils, or may lack."""
    if "contains" not in schema or "unevaluatedItems" in schema:  # which asks what it has found
        return schema
    inner, least, most = schema["contains"], schema.get("minContains", 1), schema.get("maxContains")
    own = {"contains", "minContains", "maxContains"}
    rest = {name: value for name, value in schema.items() if name not in own}
    if isinstance(least, bool) or not isinstance(least, int):
        return schema
    if least == 0 and most is None:
        return rest
    if inner is True or inner == {}:
        rest["minItems"] = max(least, rest.get("minItems", 0))
        if isinstance(most, int):
            rest["maxItems"] = min(most, rest.get("maxItems", most))
        return rest
    if inner is False and least > 0 and "type" not in rest:
        return {**rest, "type": [name for name in _TYPES if name != "array"]}
    return schema


def anchored(schema: Any) -> Any:
    """The same schema, its references to anchors as references to places.

    Only of a schema that is one resource: what an anchor is would depend on the way there else.
    """
    places: dict[str, str] = {}
    for place, part in subschemas(schema):
        if place and "$id" in part:
            return schema
        for keyword in ("$anchor", "$dynamicAnchor"):
            name = part.get(keyword)
            if isinstance(name, str) and places.setdefault(name, place) != place:
                return schema
    own = schema.get("$id", "") if isinstance(schema, dict) else ""
    known = {f"#{name}": f"#{place}" for name, place in places.items()}
    known |= {f"{own}#{name}": f"#{place}" for name, place in places.items()}
    return _linked(schema, known) if places else schema


def _linked(schema: Any, places: dict[str, str]) -> Any:
    """places: what a reference may say, and the same as a place."""
    if isinstance(schema, list):
        return [_linked(inner, places) for inner in schema]
    if not isinstance(schema, dict):
        return schema
    made: dict[str, Any] = {}
    for name, value in schema.items():
        if name in ("$ref", "$dynamicRef") and isinstance(value, str) and value in places:
            made["$ref"] = places[value]
        elif name in ("$anchor", "$dynamicAnchor"):
            continue
        elif name in BY_NAME and isinstance(value, dict):
            made[name] = {key: _linked(inner, places) for key, inner in value.items()}
        else:
            made[name] = value if name in DATA else _linked(value, places)
    return made


def subschemas(schema: Any, place: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    """Every schema within one, itself included, and where it stands (a JSON pointer)."""
    if isinstance(schema, list):
        for number, inner in enumerate(schema):
            yield from subschemas(inner, f"{place}/{number}")
    if not isinstance(schema, dict):
        return
    yield place, schema
    for name, value in schema.items():
        if name in BY_NAME and isinstance(value, dict):
            for key, inner in value.items():
                yield from subschemas(inner, f"{place}/{name}/{_escaped(key)}")
        elif name not in DATA:
            yield from subschemas(value, f"{place}/{name}")


def _escaped(key: str) -> str:
    return key.replace("~", "~0").replace("/", "~1")


def placed(message: str, schema: Any) -> str:
    """A compiler's message about a schema, and where in it what it names stands first."""
    if not isinstance(schema, dict):
        return message
    listed = re.search(r"keys: (\[.*?\])", message)
    names = json.loads(listed[1]) if listed else re.findall(r"[$A-Za-z]+", message)
    value = re.search(r"Invalid type: (\S+)", message)
    for place, part in subschemas(schema):
        if value:
            found = "type" if value[1] in str(part.get("type", "")) else None
        else:
            found = next((name for name in names if name in part), None)
        if found is not None:
            return f"{message} (at #{place}/{found})"
    return message
