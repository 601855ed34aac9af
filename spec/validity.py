"""Whether a finished text is valid under the whole schema, for what could not be enforced.

Only asked where keywords were ignored, between two steps, so it has to be quick: schemas with
regular expressions are left alone (Python's could be made to run for ever), references are counted
and not followed out of the schema. Knows no grammars and no tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from jsonschema import Draft202012Validator, validators
from referencing import Registry

MOST_BYTES = 64 << 10
MOST_REFERENCES = 1000


class _TooMany(Exception):
    """Following references multiplies."""


def valid(text: bytes, schema: Any) -> bool | None:
    """None where it can't be told: long texts, regular expressions, foreign references."""
    if len(text) > MOST_BYTES or _has_patterns(schema):
        return None
    try:
        value = json.loads(text)
    except ValueError:
        return False
    try:
        return bool(_checker()(schema, registry=Registry()).is_valid(value))
    except Exception:
        # Whatever somebody's schema makes the validator stumble over.
        return None


def _has_patterns(schema: Any) -> bool:
    waiting = [schema]
    while waiting:
        value = waiting.pop()
        if isinstance(value, list):
            waiting += value
        elif isinstance(value, dict):
            if "pattern" in value or "patternProperties" in value:
                return True
            waiting += value.values()
    return False


def _checker() -> Any:
    """A validator class that follows so many references only."""
    left = MOST_REFERENCES

    def counted(name: str) -> Any:
        follow = Draft202012Validator.VALIDATORS[name]

        def check(*given: Any) -> Iterator[Any]:
            nonlocal left
            left -= 1
            if left < 0:
                raise _TooMany
            yield from follow(*given) or ()

        return check

    names = ("$ref", "$dynamicRef")
    return validators.extend(Draft202012Validator, {name: counted(name) for name in names})
