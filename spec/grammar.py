"""Compiled grammars and matchers, behind which llguidance does the work.

A `Grammar` belongs to one `Lexicon` (a tokenizer's words); each choice walks it with a `Matcher` of
its own. Masks are bit rows over the vocabulary. End ids are never told to a matcher: whether the
text may end is asked of it instead. Knows no requests, no trees and no devices.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from spec_serve.spec.trial import limits

Mask = npt.NDArray[np.uint64]  # [ceil(V / 64)], bit i of word w: token id 64 w + i


class Spelling(Protocol):
    """The part of a tokenizer needed here; target/tokenizer.py has it."""

    vocab_size: int
    eos_ids: frozenset[int]
    unused_ids: frozenset[int]

    def encode(self, text: str, *, special: bool = ..., bos: bool | None = ...) -> list[int]: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


class _Words:
    """A tokenizer as llguidance wants it: names, and the ids of a text when called."""

    is_tokenizer_wrapper = True

    def __init__(self, spelling: Spelling) -> None:
        self._spelling = spelling
        ids = range(spelling.vocab_size)
        unused = spelling.unused_ids
        self.tokens = [b"" if i in unused else spelling.token_bytes(i) for i in ids]
        self.special_token_ids = [i for i in ids if spelling.is_special(i)]
        # It wants one at least; a text that may end is recognised without it.
        self.ends = sorted(spelling.eos_ids) or self.special_token_ids[:1] or [len(ids)]
        if self.ends == [len(ids)]:
            self.tokens.append(b"<end>")
            self.special_token_ids.append(len(ids))
        self.eos_token_id = self.ends[0]
        self.bos_token_id: int | None = None

    def __call__(self, text: str) -> list[int]:
        return self._spelling.encode(text, bos=False)


class Lexicon:
    """A tokenizer's words in llguidance's form. Making it takes 0.2 s for 49k words."""

    def __init__(self, spelling: Spelling) -> None:
        words = _Words(spelling)
        self.size = spelling.vocab_size
        self.spelling = spelling
        self.tokens = words.tokens[: self.size]
        self.words = (self.size + 63) // 64
        self.tokenizer = LLTokenizer(
            words,  # type: ignore[arg-type]
            n_vocab=len(words.tokens),
            eos_token=words.ends,
        )
        self.keep = ~self.bits(i for i in words.ends if i < self.size)  # all but end ids
        if self.size % 64:
            self.keep[-1] &= np.uint64((1 << self.size % 64) - 1)

    def bits(self, ids: Any) -> Mask:
        """A mask of exactly these ids."""
        made = np.zeros(self.words, dtype=np.uint64)
        for i in ids:
            made[i >> 6] |= np.uint64(1 << (i & 63))
        return made

    @cached_property
    def control(self) -> dict[bytes, int]:
        """Control tokens by their text."""
        return {
            text: i for i, text in enumerate(self.tokens) if self.spelling.is_special(i) and text
        }


class MatchError(Exception):
    """A matcher gave up; the message says why."""


class Matcher:
    """One text's way through a grammar."""

    __slots__ = ("_lexicon", "_matcher")

    def __init__(self, matcher: LLMatcher, lexicon: Lexicon) -> None:
        self._matcher = matcher
        self._lexicon = lexicon

    def copy(self) -> Matcher:
        """A second one at the same place; a few microseconds."""
        return Matcher(self._matcher.deep_copy(), self._lexicon)

    @property
    def stopped(self) -> bool:
        """Whether nothing but the end can follow."""
        return self._matcher.is_stopped()

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting() and not self._matcher.is_error()

    def allowed(self) -> Mask:
        """Tokens that may follow, end ids left out. Where the grammar fixes the bytes that is the
        one token the tokenizer would write. Raises MatchError."""
        if self._matcher.is_stopped() and not self._matcher.is_error():
            return np.zeros(self._lexicon.words, dtype=np.uint64)
        raw = self._matcher.compute_bitmask()
        self._check()
        mask = np.zeros(self._lexicon.words, dtype=np.uint64)
        mask.view(np.uint8)[: len(raw)] = np.frombuffer(raw, dtype=np.uint8)[: mask.nbytes]
        mask &= self._lexicon.keep
        return mask

    def forced(self) -> list[int]:
        """The tokens that must follow, as far as there is no choice."""
        if self._matcher.is_stopped():
            return []
        return list(self._matcher.compute_ff_tokens())

    def advance(self, token: int) -> bool:
        """Take a token; False if the grammar doesn't, which leaves the matcher where it was."""
        if self._matcher.is_stopped():
            return False
        taken = self._matcher.try_consume_tokens([token]) == 1
        self._check()
        return taken

    def back(self) -> None:
        """Undo the last `advance` that was True."""
        self._matcher.rollback(1)
        self._check()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise MatchError(self._matcher.get_error().strip().split("\n")[0][:200])


class Grammar:
    """A grammar compiled for a lexicon. ignored: keywords of its schema that are not enforced."""

    def __init__(self, lexicon: Lexicon, source: str, schema: Any = None) -> None:
        """Raises MatchError saying what is wrong with the source, and where."""
        made = LLMatcher(lexicon.tokenizer, source, log_level=0, limits=limits())
        if made.is_error():
            raise MatchError(tidy(made.get_error()))
        self.lexicon = lexicon
        self.schema = schema
        self.ignored = _ignored(made.get_grammar_warnings())
        self._prototype = Matcher(made, lexicon)
        first = self._prototype.copy()
        if not first.allowed().any():
            raise MatchError("only the empty text fits it" if first.complete else "no text fits it")
        self.cost = (96 << 10) + 8 * len(source)  # bytes, about

    def start(self) -> Matcher:
        """A matcher at the beginning."""
        return self._prototype.copy()


def tidy(message: str) -> str:
    """A compiler's message in one line, without its drawing of the source."""
    message = message.partition("<backtrace>")[0].replace("<non-verbose/>", "")
    if message.startswith("NoExtension"):
        return "no text fits it"
    raw = message.strip().split("\n")
    lines = [line.strip() for line in raw]
    for before, line in pairwise(raw):
        # Below a regular expression, which stands four blanks further in.
        if before.startswith("    ") and line.strip() and set(line.strip()) == {"^"}:
            lines.append(f"at its character {line.index('^') - 3}")
    return "; ".join(line for line in lines if line and "|" not in line[:6] and set(line) != {"^"})[
        :300
    ]


def _ignored(warnings: Sequence[str]) -> tuple[str, ...]:
    """Names of keywords in llguidance's warnings about what it leaves out."""
    found: list[str] = []
    for warning in warnings:
        head, _, rest = warning.partition(": ")
        if head == "Unimplemented keys":
            found += json.loads(rest)
        elif head == "Unknown format":
            found.append(f"format {rest}")
        else:
            found.append(warning.split()[0])
    return tuple(dict.fromkeys(found))
