"""From tokens to text, one choice at a time: bytes to characters, stop strings, what may be shown.

The same class serves both sides, so that they can't disagree: in the engine's thread it finds the
token that completes a stop string, in a transport it yields the text that is safe to show. Tokens
of a stop string count as completion tokens and appear among the token ids; the text ends before
them. Knows nothing of requests, sockets or chat templates.
"""

from __future__ import annotations

import codecs
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

_decode = codecs.utf_8_decode


class TokenTable(Protocol):
    """The part of a tokenizer needed here."""

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def is_special(self, token_id: int, /) -> bool: ...


class StopStrings:
    """Stop strings compiled once per request: an automaton over characters (Aho, Corasick 1975).

    State 0 is the root. `depth[s]`: length of the longest end of the text that begins a stop
    string. `ends[s]`: the longest stop string that ends in s, or "". Following a character costs
    the same for one stop string and for a thousand. Raises ValueError for an empty one.
    """

    __slots__ = ("_fail", "_next", "depth", "ends", "initials", "strings")

    def __init__(self, stops: Sequence[str]) -> None:
        self.strings = tuple(stops)
        self._next: list[dict[str, int]] = [{}]
        self._fail = [0]
        self.depth = [0]
        self.ends = [""]
        for stop in stops:
            if not stop:
                raise ValueError("a stop string must not be empty")
            state = 0
            for char in stop:
                child = self._next[state].get(char)
                if child is None:
                    child = self._next[state][char] = len(self._next)
                    self._next.append({})
                    self._fail.append(0)
                    self.depth.append(self.depth[state] + 1)
                    self.ends.append("")
                state = child
            self.ends[state] = stop
        self.initials = frozenset(self._next[0])
        waiting = deque(self._next[0].values())
        while waiting:  # breadth first: shorter states have their failure links already
            state = waiting.popleft()
            for char, child in self._next[state].items():
                self._fail[child] = self.step(self._fail[state], char)
                if not self.ends[child]:
                    self.ends[child] = self.ends[self._fail[child]]
                waiting.append(child)

    def step(self, state: int, char: str) -> int:
        """The state after one more character."""
        following = self._next
        while (found := following[state].get(char)) is None:
            if not state:
                return 0
            state = self._fail[state]
        return found


class Pieces(dict[int, bytes]):
    """Bytes that each token shows, filled as tokens are met. Control tokens show nothing if told.

    shown: control tokens that show nevertheless.
    """

    def __init__(self, tokenizer: TokenTable, skip_special: bool, shown: frozenset[int]) -> None:
        super().__init__()
        self._tokenizer = weakref.ref(tokenizer)
        self._skip_special, self._shown = skip_special, shown

    def __missing__(self, token: int) -> bytes:
        table = self._tokenizer()
        assert table is not None, "who has the pieces has the tokenizer"
        hidden = self._skip_special and table.is_special(token) and token not in self._shown
        made = self[token] = b"" if hidden else table.token_bytes(token)
        return made


_pieces: weakref.WeakKeyDictionary[TokenTable, dict[tuple[bool, frozenset[int]], Pieces]] = (
    weakref.WeakKeyDictionary()
)


def pieces(tokenizer: TokenTable, skip_special: bool, shown: frozenset[int]) -> Pieces:
    """The pieces of a tokenizer, shared by all streams."""
    made = _pieces.setdefault(tokenizer, {})
    key = skip_special, shown
    if key not in made:
        made[key] = Pieces(tokenizer, skip_special, shown)
    return made[key]


class TextStream:
    """Text of one choice, as its tokens come.

    stops: stop strings, or compiled ones to share between choices. skip_special: control tokens
    give no text, but for those in `shown`. include_stop: the stop string itself is part of the
    text. min_tokens: a stop completed by an earlier token doesn't count. A character whose bytes
    are spread over tokens appears with its last one; what is cut off at the end becomes U+FFFD in
    `finish`, streamed or not. `stopped` is the stop string that ended the text; nothing comes
    after it.
    """

    __slots__ = (
        "_count", "_cut", "_held", "_include_stop", "_min_tokens", "_piece", "_state", "_tokenizer",
        "stopped", "stops",
    )  # fmt: skip

    def __init__(
        self,
        tokenizer: TokenTable,
        stops: StopStrings | Sequence[str] = (),
        skip_special: bool = True,
        include_stop: bool = False,
        min_tokens: int = 0,
        shown: frozenset[int] = frozenset(),
    ) -> None:
        if isinstance(stops, StopStrings):
            self.stops: StopStrings | None = stops
        else:
            self.stops = StopStrings(stops) if stops else None
        self._tokenizer = tokenizer
        self._piece = pieces(tokenizer, skip_special, shown).__getitem__
        self._include_stop = include_stop
        self._min_tokens = min_tokens
        self._cut = b""  # the beginning of a character
        self._state = 0
        self._held = ""
        self._count = 0  # tokens so far, where there are stop strings
        self.stopped: str | None = None

    def push(self, tokens: Sequence[int]) -> str:
        """Append tokens; the text that can be shown now: none of it can begin a stop string."""
        if self.stopped is not None:
            return ""
        if self.stops is None:
            data = b"".join(map(self._piece, tokens))
            if not self._cut:
                # Nearly always whole characters; trying costs less than the decoder that asks.
                try:
                    return data.decode()
                except UnicodeDecodeError:
                    pass
            return self._characters(data)
        parts: list[str] = []
        for token in tokens:
            self._count += 1
            if text := self._text(token):
                parts.append(self._follow(text, self._count >= self._min_tokens))
                if self.stopped is not None:
                    break
        return "".join(parts)

    def finish(self) -> str:
        """The rest: text held back, and U+FFFD for a character cut in the middle."""
        if self.stopped is not None:
            return ""
        rest = self._held + _decode(self._cut, "replace", True)[0]
        self._held, self._cut, self._state = "", b"", 0
        return rest

    def feed(self, tokens: Sequence[int], active_from: int) -> tuple[int, str] | None:
        """The Watch protocol of spec/request.py: where the first stop string is complete."""
        for i, token in enumerate(tokens):
            if text := self._text(token):
                self._follow(text, i >= active_from)
                if self.stopped is not None:
                    return i + 1, self.stopped
        return None

    def before(self, tokens: Sequence[int]) -> int | None:
        """The Watch protocol: how many tokens stand before the stop string that ended the text."""
        stop, tail, count = (self.stopped or "").encode(), b"", len(tokens)
        while count and stop not in tail:
            count -= 1
            tail = self._piece(tokens[count]) + tail
        return count if tail.startswith(stop) else None

    def _text(self, token: int) -> str:
        return self._characters(self._piece(token))

    def _characters(self, data: bytes) -> str:
        if self._cut:
            data = self._cut + data
        text, used = _decode(data, "replace", False)
        self._cut = data[used:]
        return text

    def _follow(self, text: str, counts: bool) -> str:
        """Run the automaton over new text; returns what is safe. Sets `stopped` at a stop."""
        stops = self.stops
        if stops is None or (not self._state and stops.initials.isdisjoint(text)):
            return text
        step, ends, state = stops.step, stops.ends, self._state
        for i, char in enumerate(text):
            state = step(state, char)
            if counts and (stop := ends[state]):
                self.stopped = stop
                shown = self._held + text[: i + 1]
                self._held = ""
                return shown if self._include_stop else shown[: len(shown) - len(stop)]
        self._state = state
        whole = self._held + text
        keep = len(whole) - stops.depth[state]
        self._held = whole[keep:]
        return whole[:keep]


@dataclass(frozen=True, slots=True)
class StopWatch:
    """Makes the watcher of each choice (spec/request.py's Stopping.watch).

    Plain data apart from the tokenizer, so that an engine in another process can have the same.
    """

    tokenizer: TokenTable
    stops: StopStrings
    skip_special: bool = True
    shown: frozenset[int] = frozenset()

    def __call__(self) -> TextStream:
        return TextStream(self.tokenizer, self.stops, self.skip_special, shown=self.shown)
