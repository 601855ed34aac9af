"""Chat templates: Jinja as model makers write it, and user text that can't pass for control tokens.

Templates come with the model and run in a bounded sandbox (chat_sandbox.py) with what transformers
offers them. `Marks` rewrites texts on their way into a template so that after rendering it is known
which control tokens the template wrote and which are only text of a message. Knows nothing of ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime
from functools import lru_cache
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser

from spec_serve.target import chat_sandbox

_PRIVATE_USE = (range(0xF0000, 0xFFFFE), range(0x100000, 0x10FFFE), range(0xE000, 0xF900))


class ChatTemplateError(ValueError):
    """A template that doesn't compile or refuses the messages; carries the template's words."""


class _Generation(Extension):
    """`{% generation %}` marks what the assistant said, for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012  (the attribute's type is Jinja's)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON without the escapes for HTML that Jinja's own filter writes."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


@lru_cache(maxsize=32)
def _compile(source: str) -> jinja2.Template:
    environment = chat_sandbox.Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise
    environment.globals["strftime_now"] = _now
    return environment.template(source)


@lru_cache(maxsize=32)
def variables(source: str) -> frozenset[str]:
    """Names a template takes from outside; none of one that does not compile."""
    try:
        compiled = _compile(source)
        return frozenset(meta.find_undeclared_variables(compiled.environment.parse(source)))
    except (jinja2.TemplateError, RecursionError):
        return frozenset()


def render(source: str, variables: dict[str, Any]) -> str:
    """Fill in a template. Raises ChatTemplateError for whatever goes wrong inside it."""
    try:
        return chat_sandbox.render(_compile(source), variables)
    except jinja2.TemplateError as error:
        raise ChatTemplateError(str(error) or type(error).__name__) from error
    except (
        TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError,
    ) as error:  # fmt: skip
        raise ChatTemplateError(f"{type(error).__name__}: {error}") from error


class Marks:
    """Finds the texts of control tokens, and hides those that come with messages.

    A hidden mark has its first character replaced by a private-use one that occurs nowhere in the
    messages or the template, so lengths stay, and whatever the template does to the text (tests,
    splits, JSON) goes on working. `restore` undoes it.
    """

    def __init__(self, texts: Iterable[str]) -> None:
        self._texts = frozenset(texts) - {""}
        self._lengths: dict[str, list[int]] = {}
        for text in self._texts:
            lengths = self._lengths.setdefault(text[0], [])
            if len(text) not in lengths:
                lengths.append(len(text))
        for lengths in self._lengths.values():
            lengths.sort(reverse=True)
        self._longest = max(map(len, self._texts), default=0)
        self._starts = frozenset(text[:n] for text in self._texts for n in range(1, len(text)))

    def find(self, text: str) -> list[tuple[int, int]]:
        """(start, end) of the marks in a text, the leftmost first and the longest of those."""
        found: list[tuple[int, int]] = []
        at = 0
        for start in self._candidates(text):
            if start >= at and (length := self._length(text, start)):
                at = start + length
                found.append((start, at))
        return found

    def hide(self, value: Any, free: dict[str, str]) -> Any:
        """`value` (JSON) with every mark in its strings and keys hidden, and also the start of a
        mark at a string's end, which the template could complete with what it writes next.

        free: the replacement of each character, from `replacements`.
        """
        if isinstance(value, str):
            return self._hide_text(value, free)
        if isinstance(value, dict):
            return {self.hide(key, free): self.hide(entry, free) for key, entry in value.items()}
        if isinstance(value, (list, tuple)):
            return [self.hide(entry, free) for entry in value]
        return value

    def replacements(self, *inputs: Any) -> dict[str, str]:
        """First character of a mark -> a private-use character that `inputs` don't hold."""
        used = {character for value in inputs for character in _private_use(value)}
        spare = (chr(i) for block in _PRIVATE_USE for i in block if chr(i) not in used)
        return {first: next(spare) for first in self._lengths}

    def _candidates(self, text: str) -> list[int]:
        places: list[int] = []
        for first in self._lengths:
            at = text.find(first)
            while at >= 0:
                places.append(at)
                at = text.find(first, at + 1)
        places.sort()
        return places

    def _length(self, text: str, start: int) -> int:
        for length in self._lengths[text[start]]:
            if text[start : start + length] in self._texts:
                return length
        return 0

    def _hide_text(self, text: str, free: dict[str, str]) -> str:
        tail = len(text) - self._longest
        # Every place where a mark begins, overlapping ones too: the first hidden may uncover more.
        places = [
            start
            for start in self._candidates(text)
            if self._length(text, start) or (start > tail and text[start:] in self._starts)
        ]
        if not places:
            return text
        characters = list(text)
        for start in places:
            characters[start] = free[characters[start]]
        return "".join(characters)


def restore(text: str, free: dict[str, str]) -> str:
    """Hidden marks as they were."""
    return text.translate({ord(hidden): first for first, hidden in free.items()})


def _private_use(value: Any) -> set[str]:
    if isinstance(value, str):
        if value.isascii():
            return set()
        return {c for c in value if any(ord(c) in block for block in _PRIVATE_USE)}
    if isinstance(value, dict):
        return set().union(*(_private_use(k) | _private_use(v) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return set().union(*map(_private_use, value))
    return set()
