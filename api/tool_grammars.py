"""How model families write tool calls: one grammar each, read character by character.

A grammar is a generator entered behind its opening marker and sent one character at a time; it
tells a `Calls` what it finds and raises Malformed for everything else. It returns True where its
last character belongs to what follows. Who writes how is in api/tool_formats.py. Knows no tokens.
"""

from __future__ import annotations

import ast
import json
import warnings
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Protocol

from spec_serve.api.tool_json import (
    MAX_NAME,
    Malformed,
    Scan,
    container,
    skipped,
    space,
    string,
    until,
)

MAX_SOURCE = 64 << 10  # characters of Python that are kept until they can be read


class Calls(Protocol):
    """Where grammars put what they find."""

    def open(self, name: str) -> Mapping[str, Any]:
        """A call begins; its parameters' schema. Malformed for a name that is no tool."""
        ...

    def knows(self, name: str) -> bool:
        """Whether a call of this name may be opened."""
        ...

    def write(self, text: str, /) -> None:
        """The next piece of the open call's arguments, which are JSON."""
        ...

    def close(self) -> None:
        """The open call is complete."""
        ...


Grammar = Callable[[Calls], Scan[bool]]


# ------------------------------------------------------------------ JSON objects


def json_call(calls: Calls) -> Scan[None]:
    """{"name": ..., "arguments": {...}} behind its first brace, keys in any order.

    "parameters" is the same as "arguments". Arguments that come before the name wait for it.
    """
    named = opened = False
    early = ""
    char = yield from space()
    while True:
        if char != '"':
            raise Malformed
        key = yield from string(MAX_NAME)
        if (yield from space()) != ":":
            raise Malformed
        char = yield from space()
        if key == "name" and not named and char == '"':
            calls.open((yield from string(MAX_NAME)))
            named = True
            if early:
                calls.write(early)
            char = yield
        elif key in ("arguments", "parameters") and not opened and char in '{"':
            opened = True
            parts: list[str] = []
            yield from _arguments(calls.write if named else parts.append, char)
            early = "".join(parts)
            char = yield
        elif named or key in ("type", "id", "function", "arguments", "parameters"):
            char = yield from skipped(char)
        else:
            raise Malformed
        char = yield from space(char)
        if char == "}":
            break
        if char != ",":
            raise Malformed
        char = yield from space()
    if not named:
        raise Malformed
    if not opened:
        calls.write("{}")
    calls.close()


def _arguments(write: Callable[[str], object], first: str) -> Scan[None]:
    """An object, or one written as a string as in OpenAI's messages."""
    if first == "{":
        yield from container(write, first)
        return
    text = yield from string()
    try:
        if not isinstance(json.loads(text), dict):
            raise Malformed
    except (ValueError, RecursionError):
        raise Malformed from None
    write(text)


def _array(calls: Calls, first: str) -> Scan[None]:
    """Calls in an array, from its first element's first character on."""
    char = first
    while True:
        if char != "{":
            raise Malformed
        yield from json_call(calls)
        char = yield from space()
        if char == "]":
            calls.close()
            return
        if char != ",":
            raise Malformed
        char = yield from space()


def json_calls(calls: Calls) -> Scan[bool]:
    """An object, or an array of them."""
    return (yield from _json_calls(calls, (yield from space())))


def _json_calls(calls: Calls, char: str) -> Scan[bool]:
    if char == "{":
        yield from json_call(calls)
    elif char == "[":
        yield from _array(calls, (yield from space()))
    else:
        raise Malformed
    return False


def listed_calls(calls: Calls) -> Scan[bool]:
    """Llama's: objects one after the other, between them a semicolon or nothing."""
    if (yield from space()) != "{":
        raise Malformed
    while True:
        yield from json_call(calls)
        char = yield from space()
        if char == ";":
            calls.close()
            char = yield from space()
        if char != "{":
            return True


# --------------------------------------------------------- Hermes and Qwen3-Coder


def tagged_call(calls: Calls) -> Scan[bool]:
    """Behind <tool_call>: JSON, or Qwen3-Coder's <function=...>."""
    char = yield from space()
    if char != "<":
        return (yield from _json_calls(calls, char))
    if (yield from until("=", MAX_NAME)) != "function":
        raise Malformed
    return (yield from xml_call(calls))


def xml_call(calls: Calls) -> Scan[bool]:
    """Behind <function=: name>, then <parameter=key>value</parameter>, </function>."""
    schema = calls.open((yield from until(">", MAX_NAME)).strip())
    known = schema.get("properties")
    before = "{"
    while True:
        if (yield from space()) != "<":
            raise Malformed
        tag = yield from until(">", MAX_NAME + len("parameter="))
        if tag == "/function":
            break
        if not tag.startswith("parameter="):
            raise Malformed
        key = tag.removeprefix("parameter=").strip()
        calls.write(f"{before}{_quoted(key)}: ")
        before = ", "
        yield from _xml_value(calls, known.get(key) if isinstance(known, Mapping) else None)
    calls.write("}" if before == ", " else "{}")
    calls.close()
    return False


_END = "</parameter>"
_MAY_END = [text[:n] for text in ("\n" + _END, _END) for n in range(len(text), 0, -1)]


def _xml_value(calls: Calls, schema: object) -> Scan[None]:
    """A parameter's text as JSON; strings are passed on as they come."""
    kind = schema.get("type") if isinstance(schema, Mapping) else "string"
    held = yield
    if held == "\n":  # the line break behind the tag is not part of the value
        held = ""
    if kind != "string":
        value = yield from until(_END, MAX_SOURCE, held)
        calls.write(_typed(value.removesuffix("\n"), kind))
        return
    calls.write('"')
    while True:
        if held.endswith(_END):
            text = held.removesuffix(_END).removesuffix("\n")
            calls.write(_quoted(text)[1:])
            return
        keep = next((len(start) for start in _MAY_END if held.endswith(start)), 0)
        if keep < len(held):
            calls.write(_quoted(held[: len(held) - keep])[1:-1])
            held = held[len(held) - keep :]
        held += yield


def _typed(text: str, kind: object) -> str:
    """JSON for a text whose schema allows more than strings, or says nothing."""
    text = text.strip()
    if isinstance(kind, list) and "string" in kind:
        return text if text == "null" and "null" in kind else _quoted(text)
    if kind == "boolean" and text.lower() in ("true", "false"):
        return text.lower()
    try:
        json.loads(text, parse_constant=_refused)
    except (ValueError, RecursionError):
        return _quoted(text)
    return text


def _refused(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)


# ---------------------------------------------------------------------- Mistral


def mistral_calls(calls: Calls) -> Scan[bool]:
    """Behind [TOOL_CALLS]: an array, or since v11 name[ARGS]{...}, also with [CALL_ID]."""
    char = yield from space()
    if char == "[":
        yield from _array(calls, (yield from space()))
        return False
    if char == "{":
        yield from json_call(calls)
        return False
    name = char
    while (char := (yield)) not in "[{":
        name += char
        if len(name) > MAX_NAME:
            raise Malformed
    while char == "[":
        tag = yield from until("]", len("CALL_ID"))
        char = yield
        if tag == "CALL_ID":
            while char != "[":
                char = yield
        elif tag != "ARGS":
            raise Malformed
        else:
            char = yield from space(char)
            break
    if char != "{":
        raise Malformed
    calls.open(name.strip())
    yield from container(calls.write, char)
    calls.close()
    return False


# --------------------------------------------------------------------- DeepSeek

SEPARATOR = "<｜tool▁sep｜>"


def deepseek_call(calls: Calls) -> Scan[bool]:
    """V3 and R1: function, separator, name, a fenced object. V3.1: name, separator, object."""
    name = (yield from until(SEPARATOR, MAX_NAME)).strip()
    char = yield from space()
    if char != "{":
        if name != "function":
            raise Malformed
        name = (char + (yield from until("\n", MAX_NAME))).strip()
        for expected in "```json":
            char = yield from space() if expected == "`" else _next()
            if char != expected:
                raise Malformed
        char = yield from space()
        if char != "{":
            raise Malformed
    calls.open(name)
    yield from container(calls.write, char)
    calls.close()
    return False


def _next() -> Scan[str]:
    return (yield)


# ------------------------------------------------------------------------ Gemma


def fenced_calls(calls: Calls) -> Scan[bool]:
    """Behind ```tool_code: JSON, or calls in Python, which are read once the fence closes."""
    char = yield from space()
    source = char
    if char == "[":
        char = yield from space()
        source += char
        if char == "{":
            yield from _array(calls, char)
            return (yield from _fence(calls))
    elif char == "{":
        yield from json_call(calls)
        return (yield from _fence(calls))
    _tell(calls, _python_calls(source + (yield from until("```", MAX_SOURCE))))
    return False


def bracketed_calls(calls: Calls) -> Scan[bool]:
    """A list without a marker: objects, or calls in Python as some Llamas and Gemmas write them."""
    yield  # the bracket
    char = yield from space()
    if char == "{":
        yield from _array(calls, char)
        return False
    name = ""
    while char != "(":
        if not (char.isalnum() or char in "_.-") or len(name) > MAX_NAME:
            raise Malformed
        name += char
        char = yield
    if not calls.knows(name):
        raise Malformed
    source, depth, quote = ["[", name, "("], 2, ""
    while depth:
        char = yield
        source.append(char)
        if len(source) > MAX_SOURCE:
            raise Malformed
        if quote:
            if char == "\\":
                source.append((yield))
            elif char == quote:
                quote = ""
        elif char in "'\"":
            quote = char
        elif char in "([{":
            depth += 1
        elif char in ")]}":
            depth -= 1
    _tell(calls, _python_calls("".join(source)))
    return False


def fenced_json(calls: Calls) -> Scan[bool]:
    """Behind ```json, which may hold anything else as well."""
    yield from _json_calls(calls, (yield from space()))
    return (yield from _fence(calls))


def _fence(calls: Calls) -> Scan[bool]:
    """The closing fence, if there is one."""
    char = yield from space()
    if char != "`":
        return True
    for _ in range(2):
        if (yield) != "`":
            raise Malformed
    calls.close()
    return False


def _tell(calls: Calls, found: list[tuple[str, str]]) -> None:
    """All of them or none."""
    if not all(calls.knows(name) for name, _ in found):
        raise Malformed
    for name, arguments in found:
        calls.open(name)
        calls.write(arguments)
        calls.close()


class _Words(ast.NodeTransformer):
    """JSON's words for what Python writes otherwise; models mix them up."""

    known = MappingProxyType({"true": True, "false": False, "null": None})

    def visit_Name(self, node: ast.Name) -> ast.expr:
        """A bare name."""
        return ast.Constant(self.known[node.id]) if node.id in self.known else node


def _keywords(keywords: list[ast.keyword]) -> str:
    """Arguments as JSON."""
    values = {str(k.arg): ast.literal_eval(_Words().visit(k.value)) for k in keywords}
    dumped = json.dumps(values, ensure_ascii=False, allow_nan=False)
    dumped.encode()
    return dumped


def _python_calls(source: str) -> list[tuple[str, str]]:
    """Calls with literal keyword arguments, alone, in print() or in a list. Nothing is run."""
    found: list[tuple[str, str]] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as of a backslash that escapes nothing
            pending: list[ast.AST] = list(reversed(ast.parse(source.strip()).body))
        while pending:
            node = pending.pop()
            if isinstance(node, ast.Expr | ast.Assign):
                pending.append(node.value)
            elif isinstance(node, ast.List):
                pending += node.elts[::-1]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "print" and len(node.args) == 1:
                    pending.append(node.args[0])
                    continue
                if node.args or any(keyword.arg is None for keyword in node.keywords):
                    raise Malformed
                found.append((node.func.id, _keywords(node.keywords)))
            else:
                raise Malformed
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None
    if not found:
        raise Malformed
    return found
