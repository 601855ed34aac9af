"""Grammars for calls of tools let through what the parser reads as calls, and nothing else."""

from __future__ import annotations

import json
from typing import Any

import pytest

from spec_serve.api import messages as m
from spec_serve.api.tool_calls import TextPiece, ToolCallDelta
from spec_serve.api.tool_constraint import enforced_calls, reader
from spec_serve.spec.compiler import Compiler
from spec_serve.spec.request import RequestError
from tests.api.echo import ByteTokens

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "n": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
HERMES, LLAMA = "<tool_call>", "<|python_tag|>"
MISTRAL, MISTRAL_11 = "[TOOL_CALLS]", "[TOOL_CALLS][ARGS]"
OTHERS = ("<start_of_turn>", "<｜tool▁call", "<|tool|>")


class Marked(ByteTokens):
    """<tool_call> and its end are control tokens 257 and 258."""

    vocab_size = 259
    marks = {"<tool_call>": 257, "</tool_call>": 258}

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        return [self.marks[text]] if special and text in self.marks else super().encode(text)

    def token_bytes(self, token_id: int) -> bytes:
        shown = {number: text.encode() for text, number in self.marks.items()}
        return shown[token_id] if token_id in shown else super().token_bytes(token_id)

    def is_special(self, token_id: int) -> bool:
        return token_id >= 256


TOKENS, MARKED = ByteTokens(), Marked()
COMPILERS = {id(tokens): Compiler(tokens) for tokens in (TOKENS, MARKED)}


def tool(name: str, strict: bool | None = True, parameters: Any = PARAMETERS) -> dict[str, Any]:
    function: dict[str, Any] = {"name": name, "parameters": parameters}
    if strict is not None:
        function["strict"] = strict
    return {"type": "function", "function": function}


TOOLS = [tool("weather"), tool("time")]


def wire(tools: list[dict[str, Any]] = TOOLS, **fields: Any) -> m.Generate:
    turns = [{"role": "user", "content": "x"}]
    return m.generate({"gen": "a", "messages": turns, "tools": tools, **fields})


def takes(asked: m.Generate, template: str, text: str, tokens: ByteTokens = TOKENS) -> bool:
    """Whether the grammar lets a text through, to its end."""
    tokens.chat_template = template
    constraint = enforced_calls(asked, tokens)
    assert constraint is not None
    matcher = COMPILERS[id(tokens)].compile(constraint).grammar.start()
    return all(matcher.advance(token) for token in ids(text, tokens)) and matcher.complete


def ids(text: str, tokens: ByteTokens) -> list[int]:
    if not isinstance(tokens, Marked):
        return tokens.encode(text)
    made: list[int] = []
    while text:
        mark = next((mark for mark in tokens.marks if text.startswith(mark)), None)
        made += [tokens.marks[mark]] if mark else tokens.encode(text[0])
        text = text[len(mark or text[0]) :]
    return made


def read(asked: m.Generate, template: str, text: str) -> tuple[list[str], str]:
    """Names of calls, and the text beside them."""
    parser = reader(asked, template)
    assert parser is not None
    pieces = parser.push(text) + parser.finish()
    names = [piece.name for piece in pieces if isinstance(piece, ToolCallDelta) and piece.name]
    return names, "".join(piece.text for piece in pieces if isinstance(piece, TextPiece))


def tagged(name: str, arguments: str = '{"city": "K", "n": 1}') -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def listed(name: str, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {{"city":"K"}}}}'


ONE_AND_TWO = [
    (HERMES, tagged("time"), tagged("time") + "\n" + tagged("weather")),
    (LLAMA, listed("time", "parameters"),
     listed("time", "parameters") + "; " + listed("weather", "parameters")),
    (MISTRAL, f"[TOOL_CALLS][{listed('time')}]",
     f"[TOOL_CALLS][{listed('time')}, {listed('weather')}]"),
    (MISTRAL_11, '[TOOL_CALLS]time[ARGS]{"city": "K"}',
     '[TOOL_CALLS]time[ARGS]{"city": "K"}[TOOL_CALLS]weather[ARGS]{"city": "K"}'),
    *((other, tagged("time"), tagged("time") + "\n" + tagged("weather")) for other in OTHERS),
]  # fmt: skip


@pytest.mark.parametrize(("template", "one", "two"), ONE_AND_TWO)
def test_a_required_call_is_written_as_the_family_does(template: str, one: str, two: str) -> None:
    asked = wire(tool_choice="required")
    assert takes(asked, template, one) and takes(asked, template, two)
    assert read(asked, template, one) == (["time"], "")
    assert read(asked, template, two) == (["time", "weather"], "")
    for wrong in ("", "No.", one[:-1], "a" + one, one + "a", one.replace("time", "tide"),
                  one.replace("city", "town"), one.replace('"K"', "1")):  # fmt: skip
        assert not takes(asked, template, wrong), wrong
    single = wire(tool_choice="required", parallel_tool_calls=False)
    assert takes(single, template, one) and not takes(single, template, two)
    named = wire(tool_choice={"name": "weather"})
    assert takes(named, template, one.replace("time", "weather"))
    assert not takes(named, template, one) and not takes(named, template, two)


@pytest.mark.parametrize("tokens", [TOKENS, MARKED])
def test_strict_tools_may_be_called_in_the_middle_of_a_text(tokens: ByteTokens) -> None:
    asked = wire()
    call, other = tagged("time"), tagged("weather")
    single = wire(parallel_tool_calls=False)
    for text in ("", "a < b <tool", listed("time"), call, f"Well.\n{call}", f"{call} Done."):
        assert takes(asked, HERMES, text, tokens), text
        assert takes(single, HERMES, text, tokens), text
    for text in (call + other, f"Well.\n{call} and {other}\nDone."):
        assert takes(asked, HERMES, text, tokens), text
        assert not takes(single, HERMES, text, tokens), text
        assert read(asked, HERMES, text)[0] == ["time", "weather"]
    for text in ("<tool_call>", "a <tool_call> b", tagged("tide"), call + "<tool_call>",
                 tagged("time", "{}"), "Well. " + tagged("time", '{"city": 1}')):  # fmt: skip
        assert not takes(asked, HERMES, text, tokens), text


def test_what_was_not_enforced_is_no_call_of_a_strict_tool() -> None:
    for text in (listed("time"), f"```json\n{listed('time')}\n```",
                 "<function=time>\n<parameter=city>\nK\n</parameter>\n</function>"):  # fmt: skip
        assert takes(wire(), HERMES, text)
        assert read(wire(), HERMES, text) == ([], text)
        assert read(wire([tool("time", strict=None)]), HERMES, text)[0] == ["time"]


def test_tools_that_are_not_strict_are_enforced_as_far_as_can_be() -> None:
    parameters = {"type": "object", "properties": {"a": {"type": "array", "uniqueItems": True}}}
    asked = wire([tool("f", None, parameters)], tool_choice="required")
    TOKENS.chat_template = HERMES
    assert takes(asked, HERMES, tagged("f", '{"a": [1, 1]}'))
    assert not takes(asked, HERMES, tagged("f", '{"a": 1}'))
    made = enforced_calls(asked, TOKENS)
    assert made is not None
    assert COMPILERS[id(TOKENS)].compile(made).grammar.ignored == ("uniqueItems",)
    strict = enforced_calls(wire([tool("f", True, parameters)], tool_choice="required"), TOKENS)
    assert strict is not None
    with pytest.raises(RequestError, match="uniqueItems"):
        COMPILERS[id(TOKENS)].compile(strict)


def test_a_schema_can_not_loosen_itself() -> None:
    parameters = {**PARAMETERS, "x-guidance": {"lenient": True}, "uniqueItems": True}
    TOKENS.chat_template = HERMES
    made = enforced_calls(wire([tool("f", True, parameters)], tool_choice="required"), TOKENS)
    assert made is not None
    with pytest.raises(RequestError, match="uniqueItems"):
        COMPILERS[id(TOKENS)].compile(made)


def test_without_arguments_any_object_goes() -> None:
    function = {"type": "function", "function": {"name": "f"}}
    asked = wire([function], tool_choice="required")
    assert takes(asked, HERMES, tagged("f", "{}"))
    assert takes(asked, HERMES, tagged("f", json.dumps({"a": [1, None]})))
    assert not takes(asked, HERMES, tagged("f", "[]"))


def test_who_asks_for_nothing_gets_none() -> None:
    TOKENS.chat_template = HERMES
    assert enforced_calls(wire([tool("f", None), tool("g", False)]), TOKENS) is None
    assert enforced_calls(m.generate({"gen": "a", "prompt": "x"}), TOKENS) is None
    assert reader(m.generate({"gen": "a", "prompt": "x"}), HERMES) is None


@pytest.mark.parametrize(
    ("template", "fields", "name"),
    [
        (HERMES, {"tool_choice": {"name": "tide"}}, "tool_choice"),
        (HERMES, {"tool_choice": "required", "tools": []}, "tool_choice"),
        (LLAMA, {}, "tools[0].function.strict"),
        (HERMES, {"tools": [tool("f", True, "text")]}, "tools"),
    ],
)
def test_what_can_not_be_enforced_is_refused_by_name(
    template: str, fields: dict[str, Any], name: str
) -> None:
    TOKENS.chat_template = template
    with pytest.raises(RequestError) as caught:
        enforced_calls(wire(**fields), TOKENS)
    assert caught.value.field == name
