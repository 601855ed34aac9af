"""What OpenAI's clients ask a text to look like becomes one constraint, or is refused by name."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from spec_serve.api import messages as m
from spec_serve.api import openai_wire as w
from spec_serve.api.calls import HttpError
from spec_serve.api.openai_convert import chat, completions
from spec_serve.api.openai_forms import told

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"enum": ["ä"]}}}
TEXT = json.dumps(SCHEMA, ensure_ascii=False, separators=(",", ":"))
TURNS = [{"role": "user", "content": "a"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": SCHEMA}}


def chatted(**fields: Any) -> m.Generate:
    body = msgspec.json.encode({"messages": TURNS, **fields})
    (wire,) = chat(msgspec.json.decode(body, type=w.ChatRequest)).wires
    return wire


def completed(**fields: Any) -> m.Generate:
    body = msgspec.json.encode({"prompt": "a", **fields})
    (wire,) = completions(msgspec.json.decode(body, type=w.CompletionRequest)).wires
    return wire


def form(**json_schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


@pytest.mark.parametrize("ask", [chatted, completed])
@pytest.mark.parametrize(
    ("fields", "wanted"),
    [
        (form(name="x", schema=SCHEMA, strict=True), m.Constraint("json_schema", TEXT)),
        (form(name="x", schema=SCHEMA), m.Constraint("json_schema", TEXT, strict=False)),
        (form(schema=True, strict=None), m.Constraint("json_schema", "true", strict=False)),
        ({"response_format": {"type": "json_object"}}, m.Constraint("json_object")),
        (
            {"response_format": {"type": "json_object", "schema": SCHEMA}},
            m.Constraint("json_schema", TEXT, strict=False),
        ),
        ({"response_format": {"type": "regex", "pattern": "a+"}}, m.Constraint("regex", "a+")),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": None, "guided_json": None}, None),
        ({"structured_outputs": {"regex": "a+"}}, m.Constraint("regex", "a+")),
        ({"structured_outputs": {"json": SCHEMA}}, m.Constraint("json_schema", TEXT)),
        ({"structured_outputs": {"json": TEXT}}, m.Constraint("json_schema", TEXT)),
        ({"structured_outputs": {"json_object": True}}, m.Constraint("json_object")),
        ({"structured_outputs": {"grammar": "start: X"}}, m.Constraint("lark", "start: X")),
        (
            {"structured_outputs": {"choice": ["a", "ä"], "disable_any_whitespace": True}},
            m.Constraint("choices", '["a","ä"]', whitespace="compact"),
        ),
        ({"guided_json": SCHEMA}, m.Constraint("json_schema", TEXT)),
        ({"guided_regex": "a+"}, m.Constraint("regex", "a+")),
        ({"guided_choice": ["a"]}, m.Constraint("choices", '["a"]')),
        ({"guided_grammar": "start: X"}, m.Constraint("lark", "start: X")),
        (
            {"constraint": {"kind": "text", "max_words": 3, "banned": ["x"], "after": "now"}},
            m.Constraint("text", max_words=3, banned=["x"], after="now"),
        ),
    ],
)
def test_every_way_to_ask_becomes_a_constraint(
    ask: Any, fields: dict[str, Any], wanted: m.Constraint | None
) -> None:
    assert ask(**fields).constraint == wanted


BAD: list[tuple[dict[str, Any], str]] = [
    (form(), "response_format"),
    ({"response_format": {"type": "json_schema"}}, "response_format"),
    ({"response_format": {"type": "text", "pattern": "a"}}, "response_format"),
    ({"response_format": {"type": "regex", "pattern": "a", "schema": {}}}, "response_format"),
    ({"response_format": {"type": "regex"}}, "response_format"),
    (form(schema={"enum": ["x" * 300_000]}), "response_format"),
    ({"structured_outputs": {}}, "structured_outputs"),
    ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
    ({"structured_outputs": {"grammar": "root ::= a"}}, "structured_outputs.grammar"),
    ({"guided_grammar": "root ::= a"}, "guided_grammar"),
    ({"guided_regex": "a", "guided_choice": ["a"]}, "guided_choice"),
    ({"guided_regex": "a", "response_format": {"type": "text"}}, "guided_regex"),
    ({"guided_regex": "a" * 300_000}, "guided_regex"),
    ({"constraint": {"kind": "regex", "source": "a"}, "guided_regex": "a"}, "constraint"),
]


@pytest.mark.parametrize(("fields", "name"), BAD)
def test_what_makes_no_constraint_is_refused_by_name(fields: dict[str, Any], name: str) -> None:
    for ask in (chatted, completed):
        with pytest.raises(HttpError) as caught:
            ask(**fields)
        assert caught.value.param == name
        assert str(caught.value.message).startswith(f"{name}: ")


@pytest.mark.parametrize(
    ("field", "named"),
    [("constraint", "guided_regex"), ("constraint.source", "guided_regex"), ("prompt", "prompt")],
)
def test_a_failure_bears_the_name_that_the_client_wrote(field: str, named: str) -> None:
    body = msgspec.json.encode({"prompt": "a", "guided_regex": "("})
    asked = completions(msgspec.json.decode(body, type=w.CompletionRequest))
    error = asked.error(m.Error("invalid_request", f"{field}: is wrong", param=field))
    assert (error.param, error.message) == (named, f"{named}: is wrong")


def test_our_own_form_keeps_the_names_of_its_parts() -> None:
    body = msgspec.json.encode({"prompt": "a", "constraint": {"kind": "text", "max_chars": 5}})
    asked = completions(msgspec.json.decode(body, type=w.CompletionRequest))
    error = asked.error(m.Error("invalid_request", "constraint.max_chars: no",
                                param="constraint.max_chars"))  # fmt: skip
    assert error.param == "constraint.max_chars"


@pytest.mark.parametrize(
    ("choice", "wanted"),
    [
        (None, "auto"), ("auto", "auto"), ("required", "required"),
        ({"type": "function", "function": {"name": "f"}}, m.NamedTool("f")),
    ],
)  # fmt: skip
def test_which_tool_must_be_called(choice: Any, wanted: Any) -> None:
    wire = chatted(tools=[TOOL], tool_choice=choice, parallel_tool_calls=False)
    assert (wire.tool_choice, wire.parallel_tool_calls) == (wanted, False)
    assert chatted(tools=[TOOL], tool_choice="none").tools is None


@pytest.mark.parametrize(
    "choice",
    [
        "any", {"type": "function"}, {"type": "function", "function": {"name": "g"}},
        {"type": "allowed_tools", "allowed_tools": {}},
    ],
)  # fmt: skip
def test_other_choices_of_tools_are_refused(choice: Any) -> None:
    with pytest.raises(HttpError) as caught:
        chatted(tools=[TOOL], tool_choice=choice)
    assert caught.value.param == "tool_choice"


def test_what_became_of_a_constraint_is_told() -> None:
    usage, timings = m.Usage(1, 1), m.Timings(0, 0, 0, 0)
    finished = m.Finished(gen="0", seq=1, reason="stop", usage=usage, timings=timings)
    assert told(finished) is None
    finished.constraint = m.Constrained(True, ["uniqueItems"], None, 4)
    assert msgspec.json.encode(told(finished)) == (
        b'{"complete":true,"ignored":["uniqueItems"],"schema_valid":null,"forced":4}'
    )
