"""What OpenAI's clients ask a text to look like, as a `Constraint`.

One of response_format, structured_outputs (guided_* in older clients) and constraint, which is our
own. A schema that is not strict is enforced as far as can be; what is ignored is told in the
answer. Knows no tokenizer: whether a grammar can be served is found out further in.
"""

from __future__ import annotations

from typing import Any

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import openai_forms as f
from spec_serve.api import openai_wire as w
from spec_serve.api.calls import HttpError

_GUIDED = ("guided_json", "guided_regex", "guided_choice", "guided_grammar")


def _refused(field: str, message: str) -> HttpError:
    return HttpError("invalid_request", f"{field}: {message}", field)


def constraint(request: w.Request, names: dict[str, str]) -> dict[str, Any] | None:
    """The constraint of a request, None without one; names: gets what the client calls it.

    Raises HttpError.
    """
    found = [
        (name, value)
        for name in ("response_format", "structured_outputs", *_GUIDED, "constraint")
        if (value := getattr(request, name)) is not None
    ]
    if not found:
        return None
    (name, value), *others = found
    if others:
        raise _refused(others[0][0], f"does not go with {name}")
    if isinstance(value, m.Constraint):
        names["constraint"] = name
        made: dict[str, Any] | None = msgspec.to_builtins(value)
    elif isinstance(value, f.ResponseFormat):
        names["constraint"] = name
        made = _format(value)
    elif isinstance(value, f.StructuredOutputs):
        part, made = _structured(value)
        names["constraint"] = f"{name}.{part}"
    else:
        names["constraint"] = name
        made = _guided(name, name.removeprefix("guided_"), value)
    return made


def _format(form: f.ResponseFormat) -> dict[str, Any] | None:
    """OpenAI's three types; llama.cpp's json_object with a schema; a regex."""
    field = "response_format"
    own = {"json_schema": "json_schema", "json_object": "schema", "regex": "pattern"}
    for name in own.values():
        if getattr(form, name) is not None and own.get(form.type) != name:
            raise _refused(field, f"{name} is not for type {form.type}")
    if form.type == "text":
        return None
    if form.type == "regex":
        if form.pattern is None:
            raise _refused(field, "type regex needs pattern")
        return {"kind": "regex", "source": form.pattern}
    if form.type == "json_object":
        if form.schema is None:
            return {"kind": "json_object"}
        return {"kind": "json_schema", "source": _text(form.schema), "strict": False}
    asked = form.json_schema
    if asked is None or asked.schema is None:
        raise _refused(field, "type json_schema needs json_schema.schema")
    return {"kind": "json_schema", "source": _text(asked.schema), "strict": bool(asked.strict)}


def _structured(asked: f.StructuredOutputs) -> tuple[str, dict[str, Any]]:
    """vLLM's object, one of whose kinds is given; which, and the constraint."""
    field = "structured_outputs"
    found = [
        name for name in ("json", "regex", "choice", "grammar", "json_object")
        if getattr(asked, name) not in (None, False)
    ]  # fmt: skip
    if len(found) != 1:
        what = "exactly one of json, regex, choice, grammar and json_object is needed"
        raise _refused(field, f"{what}, got {len(found)}")
    (name,) = found
    made = _guided(f"{field}.{name}", name, getattr(asked, name))
    if asked.disable_any_whitespace:
        made["whitespace"] = "compact"
    return name, made


def _guided(field: str, kind: str, value: Any) -> dict[str, Any]:
    if kind == "json_object":
        return {"kind": "json_object"}
    if kind == "json":
        # A text is the schema, written out.
        return {"kind": "json_schema", "source": value if isinstance(value, str) else _text(value)}
    if kind == "choice":
        return {"kind": "choices", "source": _text(value)}
    if kind == "grammar":
        if "::=" in value:
            raise _refused(field, "must be in Lark, not in GBNF or EBNF")
        return {"kind": "lark", "source": value}
    return {"kind": "regex", "source": value}


def _text(value: Any) -> str:
    return msgspec.json.encode(value).decode()
