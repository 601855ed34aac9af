"""How OpenAI's clients say what a text has to look like, and what they are told of it.

OpenAI's own response_format and vLLM's structured_outputs, as msgspec structs. What they mean is
known by api/openai_constraint.py.
"""

from __future__ import annotations

from typing import Any, Literal

from msgspec import Struct

from spec_serve.api import messages as m


class JsonSchema(m.Part):
    """OpenAI's. Without strict, keywords that can't be enforced are ignored and told."""

    name: str | None = None
    schema: dict[str, Any] | bool | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(m.Part):
    """OpenAI's types; beyond them json_object with a schema (llama.cpp's) and a regex (pattern)."""

    type: Literal["text", "json_object", "json_schema", "regex"]
    json_schema: JsonSchema | None = None
    schema: dict[str, Any] | bool | None = None
    pattern: str | None = None


class StructuredOutputs(m.Part):
    """vLLM's; exactly one of the first five. json: a schema, or its text."""

    json: dict[str, Any] | bool | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool | None = None


class Constrained(Struct):
    """Beyond OpenAI's: what became of a constraint, as in api/parts.py.

    ignored: keywords of the schema that were not enforced. schema_valid: null = it can't be told.
    """

    complete: bool
    ignored: list[str]
    schema_valid: bool | None
    forced: int


def told(finished: m.Finished) -> Constrained | None:
    """What the answer tells of a choice's constraint."""
    found = finished.constraint
    if found is None:
        return None
    return Constrained(found.complete, found.ignored, found.schema_valid, found.forced)
