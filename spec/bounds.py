"""Bounds on a text that no grammar states well: lengths, words, sentences, banned strings.

They are counted token by token and become bit rows that are ANDed to a grammar's masks, so they
hold at every node of a tree. State is an immutable tuple per position: going back costs nothing.
Automata for banned strings: Aho and Corasick 1975. Knows no grammars and no requests.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from spec_serve.spec.grammar import Lexicon, Mask
from spec_serve.spec.request import Constraint

_BLANK = frozenset(b" \t\n\r\x0b\x0c")
_FULL_STOP = frozenset(b".!?")
MOST_ROWS = 512  # masks kept per automaton


class Counted(NamedTuple):
    """What stands before a position. in_word and sentence are states, the others counts.

    sentence: 0 between two, 1 within one, 2 behind its full stop. banned, marker: states of the
    automata; marker -1 = what the bounds wait for has come.
    """

    chars: int = 0
    words: int = 0
    in_word: int = 0
    sentences: int = 0
    sentence: int = 0
    banned: int = 0
    marker: int = -1


class Automaton:
    """Finds strings in bytes. table: [S, 256] next state; hits: [S] whether one ends there."""

    def __init__(self, patterns: Sequence[bytes]) -> None:
        nexts: list[dict[int, int]] = [{}]
        hits = [False]
        for pattern in patterns:
            state = 0
            for byte in pattern:
                if byte not in nexts[state]:
                    nexts[state][byte] = len(nexts)
                    nexts.append({})
                    hits.append(False)
                state = nexts[state][byte]
            hits[state] = True
        self.table = np.zeros((len(nexts), 256), dtype=np.int32)
        fail = [0] * len(nexts)
        waiting = deque([0])
        while waiting:
            state = waiting.popleft()
            if state:
                self.table[state] = self.table[fail[state]]
                hits[state] = hits[state] or hits[fail[state]]
            for byte, child in nexts[state].items():
                fail[child] = int(self.table[state, byte]) if state else 0
                self.table[state, byte] = child
                waiting.append(child)
        self.hits = np.array(hits)

    def step(self, state: int, text: bytes) -> tuple[int, int]:
        """The state behind `text`, and where in it the first string was complete (-1: nowhere)."""
        for at, byte in enumerate(text):
            state = int(self.table[state, byte])
            if self.hits[state]:
                return state, at
        return state, -1


class Counters:
    """What each token of a lexicon adds to the counts. Control tokens are no text."""

    def __init__(self, lexicon: Lexicon) -> None:
        self.lexicon = lexicon
        is_special = lexicon.spelling.is_special
        self.texts = [b"" if is_special(i) else t for i, t in enumerate(lexicon.tokens)]
        lengths = np.array([len(text) for text in self.texts], dtype=np.int64)
        self._order = np.argsort(-lengths, kind="stable")
        self._offset = (lengths.cumsum() - lengths)[self._order]
        sorted_lengths = lengths[self._order]
        longest = int(lengths.max(initial=0))
        # How many tokens have a byte at each place.
        self._alive = [int(np.searchsorted(-sorted_lengths, -p, "left")) for p in range(longest)]
        self._flat = np.frombuffer(b"".join(self.texts), dtype=np.uint8)
        self.chars = np.zeros(lexicon.size, dtype=np.int32)
        for at, ids in self._bytes():
            self.chars[ids] += (at & 0xC0) != 0x80
        blank = np.isin(np.arange(256), list(_BLANK))
        stop = np.isin(np.arange(256), list(_FULL_STOP))
        one = np.ones(256, dtype=np.int32)
        # State machines [states, 256] -> next state, and whether something begins.
        words = np.stack((~blank, ~blank)) * one
        begins = np.stack((~blank, np.zeros(256, dtype=bool)))
        self.words = self._run(words, begins)
        inside = np.where(stop, 2, 1)
        sentences = np.stack((np.where(blank, 0, inside), inside, np.where(blank, 0, inside)))
        begins = np.stack((~blank, np.zeros(256, dtype=bool), np.zeros(256, dtype=bool)))
        self.sentences = self._run(sentences, begins)
        self._rows: dict[tuple[str, int, int], Mask] = {}

    def _bytes(self) -> list[tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]]:
        """Per place, the bytes there and the tokens that have them."""
        return [
            (self._flat[self._offset[:n] + place], self._order[:n])
            for place, n in enumerate(self._alive)
        ]

    def _run(
        self, table: npt.NDArray[np.int32], begins: npt.NDArray[np.bool_]
    ) -> tuple[npt.NDArray[np.int8], npt.NDArray[np.int32]]:
        """Per state and token, the state behind it and how often something began: [S, V] each."""
        states, size = len(table), self.lexicon.size
        at = np.repeat(np.arange(states, dtype=np.int8)[:, None], size, 1)
        count = np.zeros((states, size), dtype=np.int32)
        for byte, ids in self._bytes():
            for s in range(states):
                now = at[s, ids]
                count[s, ids] += begins[now, byte]
                at[s, ids] = table[now, byte]
        return at, count

    def scan(self, automaton: Automaton, state: int) -> npt.NDArray[np.int32]:
        """Per token, where in it a string is complete first, coming from `state`; -1 = nowhere."""
        at = np.full(self.lexicon.size, state, dtype=np.int32)
        found = np.full(self.lexicon.size, -1, dtype=np.int32)
        for place, (byte, ids) in enumerate(self._bytes()):
            now = automaton.table[at[ids], byte]
            at[ids] = now
            hit = ids[automaton.hits[now] & (found[ids] < 0)]
            found[hit] = place
        return found

    def pack(self, allowed: npt.NDArray[np.bool_]) -> Mask:
        """A mask of the tokens marked."""
        made = np.zeros(self.lexicon.words, dtype=np.uint64)
        bits = np.packbits(allowed, bitorder="little")
        made.view(np.uint8)[: len(bits)] = bits
        return made

    def at_most(self, what: str, state: int, left: int) -> Mask | None:
        """Tokens that add no more than `left`; None if all do."""
        adds = {"words": self.words[1], "sentences": self.sentences[1]}.get(what)
        row = self.chars if adds is None else adds[state]
        key = (what, state, left)
        if key not in self._rows:
            if left >= int(row.max(initial=0)):
                return None
            self._rows[key] = self.pack(row <= left)
        return self._rows[key]


class Bounds:
    """The bounds of one constraint. marker: the control token they wait for, if it is one."""

    def __init__(self, counters: Counters, constraint: Constraint, marker: int | None) -> None:
        self._counters = counters
        self._asked = constraint
        self._token = marker if constraint.after else None
        self._banned = self._marker = None
        if constraint.banned:
            self._banned = Automaton([_utf8(text) for text in constraint.banned])
        if constraint.after and marker is None:
            self._marker = Automaton([_utf8(constraint.after)])
        self._rows: dict[tuple[str, int], Mask] = {}
        self.start = Counted(marker=0 if constraint.after else -1)
        tables = [a.table.nbytes for a in (self._banned, self._marker) if a is not None]
        self.cost = sum(tables) + 64 * counters.lexicon.words

    def take(self, state: Counted, token: int) -> Counted:
        """The state behind one more token."""
        counters = self._counters
        if state.marker >= 0:
            if self._marker is None:
                return state._replace(marker=-1) if token == self._token else state
            at, hit = self._marker.step(state.marker, counters.texts[token])
            return state._replace(marker=-1 if hit >= 0 else at)
        banned = state.banned
        if self._banned is not None:
            banned, _ = self._banned.step(banned, counters.texts[token])
        words, sentences = counters.words, counters.sentences
        return Counted(
            state.chars + int(counters.chars[token]),
            state.words + int(words[1][state.in_word, token]),
            int(words[0][state.in_word, token]),
            state.sentences + int(sentences[1][state.sentence, token]),
            int(sentences[0][state.sentence, token]),
            banned,
        )

    def limit(self, state: Counted, mask: Mask) -> None:
        """Take out of a mask what would break a bound."""
        asked, counters = self._asked, self._counters
        if state.marker >= 0:
            if self._marker is not None:  # where the marker ends, so does the token
                mask &= self._row("marker", state.marker)
            return
        if self.full(state):
            mask[:] = 0
            return
        if asked.max_chars is not None:
            _and(mask, counters.at_most("chars", 0, asked.max_chars - state.chars))
        if asked.max_words is not None:
            _and(mask, counters.at_most("words", state.in_word, asked.max_words - state.words))
        if asked.max_sentences is not None:
            left = asked.max_sentences - state.sentences
            _and(mask, counters.at_most("sentences", state.sentence, left))
        if self._banned is not None:
            mask &= self._row("banned", state.banned)

    def _row(self, name: str, state: int) -> Mask:
        """Tokens that complete no banned string, or nothing behind the marker: made once."""
        row = self._rows.get((name, state))
        if row is None:
            counters = self._counters
            if name == "banned":
                assert self._banned is not None
                allowed = counters.scan(self._banned, state) < 0
            else:
                assert self._marker is not None
                found = counters.scan(self._marker, state)
                lengths = np.fromiter(map(len, counters.texts), np.int32, len(counters.texts))
                allowed = (found < 0) | (found == lengths - 1)
            if len(self._rows) >= MOST_ROWS:
                self._rows.clear()
            row = self._rows[name, state] = counters.pack(allowed)
        return row

    def full(self, state: Counted) -> bool:
        """Whether a bound leaves room for nothing more.

        A character may be missing its last bytes; they add nothing, so chars alone never tell."""
        asked = self._asked
        if state.marker >= 0:
            return False
        words = asked.max_words is not None and state.words >= asked.max_words
        sentences = asked.max_sentences is not None and state.sentences >= asked.max_sentences
        return (words and not state.in_word) or (sentences and state.sentence == 0)

    def spent(self, state: Counted) -> bool:
        """Whether a bound is what ends the text here."""
        most = self._asked.max_chars
        chars = most is not None and state.marker < 0 and state.chars >= most
        return chars or self.full(state)

    def may_end(self, state: Counted) -> bool:
        """Whether the text is long enough."""
        return state.marker < 0 and state.chars >= self._asked.min_chars


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", "replace")


def _and(mask: Mask, row: Mask | None) -> None:
    if row is not None:
        mask &= row
