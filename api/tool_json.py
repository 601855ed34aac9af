"""JSON as a model writes it: followed character by character, so that it can be passed on at once.

`JsonText` checks one object or array while it comes; the readers below take strings and values out
of a stream of characters (generators, sent one character at a time). Raw control characters in
strings, which models write, become escapes; everything else that is no JSON is `Malformed`. Knows
no tools.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from typing import Literal, TypeVar

T = TypeVar("T")
Scan = Generator[None, str, T]

SPACE = " \t\r\n"
MAX_DEPTH = 200
MAX_NAME = 128  # characters of a name or key

_LITERALS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9]\d*)(?:\.\d+)?(?:[eE][+-]?\d+)?", re.ASCII)
_NUMBER_START = re.compile(
    r"-?(?:(?:0|[1-9]\d*)(?:\.(?:\d+)?)?|)(?:(?<=\d)[eE][+-]?\d*)?", re.ASCII
)
_SCALAR = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-.")
_HEX = frozenset("0123456789abcdefABCDEF")
_PAIRS = {"{": "}", "[": "]"}

_State = Literal[
    "value", "first item", "first key", "key", "colon", "next", "string", "escape", "hex", "scalar"
]


class Malformed(Exception):
    """What came is not what the format wants; the text it stands in is ordinary text."""


class JsonText:
    """Follows one object or array. `done` once its closing bracket has come."""

    __slots__ = ("_hex", "_is_key", "_scalar", "_stack", "_state", "done")

    def __init__(self) -> None:
        self._stack: list[str] = []
        self._state: _State = "value"
        self._is_key = False
        self._scalar = ""
        self._hex = 0
        self.done = False

    def feed(self, char: str) -> str:
        """The next character; what to write for it. Raises Malformed."""
        state = self._state
        if state == "string":
            return self._in_string(char)
        if state in ("escape", "hex"):
            self._escape(char)
            return char
        if state == "scalar":
            if char in _SCALAR:
                self._scalar += char
                if not _may_become_scalar(self._scalar):
                    raise Malformed
                return char
            if not _is_scalar(self._scalar):
                raise Malformed
            self._state = "next"
        if char not in SPACE:
            self._structure(char)
        return char

    def _in_string(self, char: str) -> str:
        if char == '"':
            self._state = "colon" if self._is_key else "next"
        elif char == "\\":
            self._state = "escape"
        elif char < " ":
            return json.dumps(char)[1:-1]
        return char

    def _escape(self, char: str) -> None:
        if self._state == "hex":
            if char not in _HEX:
                raise Malformed
            self._hex -= 1
            if not self._hex:
                self._state = "string"
        elif char == "u":
            self._state, self._hex = "hex", 4
        elif char in '"\\/bfnrt':
            self._state = "string"
        else:
            raise Malformed

    def _structure(self, char: str) -> None:
        state = self._state
        if state == "next":
            if char == ",":
                self._state = "key" if self._stack[-1] == "{" else "value"
            else:
                self._close(char)
        elif state in ("key", "first key"):
            if char == '"':
                self._state, self._is_key = "string", True
            elif state == "first key":
                self._close(char)
            else:
                raise Malformed
        elif state == "colon":
            if char != ":":
                raise Malformed
            self._state = "value"
        elif char in _PAIRS:
            self._stack.append(char)
            if len(self._stack) > MAX_DEPTH:
                raise Malformed
            self._state = "first key" if char == "{" else "first item"
        elif not self._stack:
            raise Malformed
        elif char == '"':
            self._state, self._is_key = "string", False
        elif char in "-0123456789tfn":
            self._state, self._scalar = "scalar", char
        elif state == "first item":
            self._close(char)
        else:
            raise Malformed

    def _close(self, char: str) -> None:
        if char != _PAIRS[self._stack[-1]]:
            raise Malformed
        self._stack.pop()
        self._state = "next"
        self.done = not self._stack


def _is_scalar(text: str) -> bool:
    return text in _LITERALS or _NUMBER.fullmatch(text) is not None


def _may_become_scalar(text: str) -> bool:
    if text[0] in "tfn":
        return any(literal.startswith(text) for literal in _LITERALS)
    return _NUMBER_START.fullmatch(text) is not None


def space(first: str = "") -> Scan[str]:
    """The first character that is no white space; `first` if it was read already."""
    char = first or (yield)
    while char in SPACE:
        char = yield
    return char


def until(end: str, limit: int, begun: str = "") -> Scan[str]:
    """The text before `end`, which is taken too; `begun` is shorter than `end` and was read.

    Malformed beyond `limit` characters.
    """
    found = list(begun)
    last = end[-1]
    while True:
        char = yield
        found.append(char)
        if char == last and "".join(found[-len(end) :]) == end:
            return "".join(found[: -len(end)])
        if len(found) >= limit + len(end):
            raise Malformed


def string(limit: int = 0) -> Scan[str]:
    """The rest of a JSON string whose opening quote was read; decoded. limit 0 = any length."""
    raw: list[str] = []
    while True:
        char = yield
        if char == '"':
            break
        raw.append(char)
        if char == "\\":
            raw.append((yield))
        if limit and len(raw) > limit:
            raise Malformed
    try:
        made = json.loads('"' + "".join(raw) + '"', strict=False)
        made.encode()
    except ValueError:  # a bad escape, or half a surrogate pair
        raise Malformed from None
    return str(made)


def container(write: Callable[[str], object], first: str) -> Scan[None]:
    """An object or array whose first character was read; its text is written as it comes."""
    follow = JsonText()
    write(follow.feed(first))
    while not follow.done:
        write(follow.feed((yield)))


def skipped(first: str) -> Scan[str]:
    """Read over a value; the character after it, which is not taken."""
    if first == '"':
        yield from string()
        return (yield)
    if first in _PAIRS:
        yield from container(len, first)
        return (yield)
    found = first
    while (char := (yield)) in _SCALAR:
        found += char
        if len(found) > MAX_NAME:
            raise Malformed
    if not _is_scalar(found):
        raise Malformed
    return char
