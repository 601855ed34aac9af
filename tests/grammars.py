"""The tiny model's tokenizer, six grammars it can follow, and engines that know both.

Imported by tests only.
"""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Constraint
from spec_serve.target.tokenizer import Tokenizer, load_tokenizer
from tests.engines import engine
from tests.tiny import write_tiny_model_dir

NESTED = {
    "type": "object",
    "properties": {
        "name_of_person": {"type": "string", "maxLength": 8},
        "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "maxItems": 3},
        "place": {
            "type": "object",
            "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 999}},
            "required": ["x"],
            "additionalProperties": False,
        },
    },
    "required": ["name_of_person", "tags", "place"],
    "additionalProperties": False,
}

SIX: dict[str, Constraint] = {
    "simple json": Constraint(
        "json_schema",
        json.dumps(
            {
                "type": "object",
                "properties": {"ok": {"type": "boolean"}, "age": {"type": "integer"}},
                "required": ["ok"],
                "additionalProperties": False,
            }
        ),
    ),
    "nested json": Constraint("json_schema", json.dumps(NESTED), whitespace="compact"),
    "date": Constraint("regex", r"[0-9]{4}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}"),
    "sql": Constraint("name", "sql_select"),
    "expressions": Constraint(
        "lark",
        'start: term (("+" | "-") term)*\nterm: /[0-9]{1,3}/ | "(" start ")" | "total_of_all"\n',
    ),
    "choices": Constraint("choices", json.dumps(["positive", "negative", "neither of them"])),
}


@cache
def spelling() -> Tokenizer:
    """Byte-level BPE with a few merges; see tests/tiny.py."""
    with tempfile.TemporaryDirectory() as folder:
        return load_tokenizer(write_tiny_model_dir(Path(folder)))


def constrained(kind: str = "none", **options: Any) -> Engine:
    """An engine that takes constraints."""
    return engine(kind, spelling=spelling(), **options)


def text(tokens: list[int]) -> str:
    """What tokens spell, control tokens left out."""
    return spelling().decode(tokens)
