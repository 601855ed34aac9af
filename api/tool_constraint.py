"""Calls of tools as grammars: what a model may write where a call is required or tools are strict.

The grammars are in llguidance's Lark, written the way the model's family writes calls
(api/tool_formats.py), so that api/tool_calls.py reads back exactly what they let through.
Parameters of tools that are not strict are enforced as far as can be. Knows no requests' lives.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from spec_serve.api import messages as m
from spec_serve.api.tool_calls import ToolParser, parser_for
from spec_serve.api.tool_formats import HERMES, LLAMA, MISTRAL, Format, format_of
from spec_serve.spec.grammar_source import BOUNDED
from spec_serve.spec.request import Constraint, RequestError

_OPEN, _CLOSE = "<tool_call>", "</tool_call>"
_WHITE = {"whitespace_pattern": BOUNDED}


class Marked(Protocol):
    """The part of a tokenizer needed here."""

    chat_template: str | None

    def encode(self, text: str, *, special: bool = ..., bos: bool | None = ...) -> list[int]: ...

    def is_special(self, token_id: int, /) -> bool: ...


def enforced_calls(wire: m.Generate, tokenizer: Marked) -> Constraint | None:
    """The constraint that a request's tools ask for; None where they ask for none.

    Their shape has been checked. Raises RequestError.
    """
    tools = [tool["function"] for tool in wire.tools or ()]
    choice = wire.tool_choice
    if not tools:
        if choice != "auto":
            raise RequestError("tool_choice", "needs tools")
        return None
    form = format_of(tokenizer.chat_template or "")
    if choice == "auto":
        strict = next((i for i, tool in enumerate(tools) if is_strict(tool)), None)
        if strict is None:
            return None
        if form is not HERMES:
            told = f"is not enforced in the {form.name} family's text unless a call is required"
            raise RequestError(f"tools[{strict}].function.strict", told)
    elif isinstance(choice, m.NamedTool):
        tools = [tool for tool in tools if tool["name"] == choice.name]
        if not tools:
            raise RequestError("tool_choice", "names none of the tools")
    single = not wire.parallel_tool_calls or isinstance(choice, m.NamedTool)
    made = _Written(tokenizer, tools, single)
    if choice == "auto":
        return Constraint("lark", made.among_text())
    return Constraint("lark", made.required(form, tokenizer.chat_template or ""))


def is_strict(function: dict[str, Any]) -> bool:
    """Whether a tool's arguments must be valid."""
    return function.get("strict") is True


def reader(wire: m.Generate, template: str | None) -> ToolParser | None:
    """The parser for one choice of a request; None where no calls are wanted."""
    choice = wire.tool_choice
    strict = any(is_strict(tool["function"]) for tool in wire.tools or ())
    return parser_for(
        template,
        wire.tools,
        {"name": choice.name} if isinstance(choice, m.NamedTool) else choice,
        only_tagged=strict and choice == "auto",  # what else looks like a call was not enforced
    )


@dataclass(frozen=True, slots=True)
class _Written:
    """The grammars of some tools. single: one call at most."""

    tokenizer: Marked
    tools: list[dict[str, Any]]
    single: bool

    def required(self, form: Format, template: str) -> str:
        """At least one call, and nothing else."""
        if form is LLAMA:
            call = self._calls('{"name": "', '", "parameters": ', "}")
            return self._lines("start: call" + ("" if self.single else ' (";" " "? call)*'), call)
        marker = self._marker("[TOOL_CALLS]")
        if form is MISTRAL and "[ARGS]" in template:
            call = self._calls("", "", "", between=self._marker("[ARGS]"))
            one = f"{marker} call"
            return self._lines(f"start: {one}" + ("" if self.single else f" ({one})*"), call)
        if form is MISTRAL:
            more = "" if self.single else ' (", " call)*'
            call = self._calls('{"name": "', '", "arguments": ', "}")
            return self._lines(f'start: {marker} "[" call{more} "]"', call)
        more = "" if self.single else ' ("\\n" call)*'
        begin, body, end = self._tagged()
        return self._lines(f"start: call{more}", f"call: {begin} body {end}", body)

    def among_text(self) -> str:
        """Any text; but what follows a <tool_call> is a call."""
        begin, body, end = self._tagged()
        if begin.startswith("<["):  # ordinary text can't hold the token
            call = f"{begin} body {end}"
            start = f"start: FREE ({call} FREE)" + ("?" if self.single else "*")
            return self._lines(start, "FREE: /(?s:.)*/", body)
        found = f"found body {end}"
        start = f"start: REST | {found} REST" if self.single else f"start: ({found})* REST"
        rest = f"REST: /(?s:.)*/ & ~/(?s:.)*{_OPEN}(?s:.)*/"
        # Lazy: it ends with the first one.
        return self._lines(start, f"found[lazy]: /(?s:.)*{_OPEN}/", rest, body)

    def _tagged(self) -> tuple[str, str, str]:
        body = self._calls('\n{"name": "', '", "arguments": ', "}\n", "body")
        return self._marker(_OPEN), body, self._marker(_CLOSE)

    def _calls(
        self, before: str, middle: str, behind: str, rule: str = "call", between: str = ""
    ) -> str:
        """A rule for one call of any of the tools, and the rules for their arguments."""
        ways, arguments = [], []
        for i, tool in enumerate(self.tools):
            parts = [_quoted(before + tool["name"] + middle), between, f"args{i}", _quoted(behind)]
            ways.append(" ".join(part for part in parts if part != '""' and part))
            arguments.append(f"args{i}: %json {_schema(tool)}")
        return self._lines(f"{rule}: " + " | ".join(ways), *arguments)

    def _marker(self, text: str) -> str:
        """A marker in the grammar: a control token by its id, else its text."""
        ids = self.tokenizer.encode(text, special=True, bos=False)
        if len(ids) == 1 and self.tokenizer.is_special(ids[0]):
            return f"<[{ids[0]}]>"
        return _quoted(text)

    @staticmethod
    def _lines(*lines: str) -> str:
        return "\n".join(lines)


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


def _schema(tool: dict[str, Any]) -> str:
    """The parameters of a tool, always an object, with how strictly they are taken."""
    given = tool.get("parameters")
    if given is None:
        schema: dict[str, Any] = {"type": "object"}
    elif isinstance(given, dict):
        schema = {"type": "object", **given}
    else:
        raise RequestError("tools", f"parameters of {tool['name']} must be a schema, an object")
    options: dict[str, Any] = dict(_WHITE)
    if not is_strict(tool):
        options |= {"lenient": True, "coerce_one_of": True}
    return json.dumps({**schema, "x-guidance": options}, ensure_ascii=False)
