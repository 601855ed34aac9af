"""Finished texts of one salt, searchable by their last tokens: text served before is found again.

Unlike the radix tree it needs no equal beginning. A corpus belongs to one salt, as the speed of an
answer must not tell one tenant what another one was answered. Knows token ids only, holds a fixed
number of them, and forgets the oldest first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from spec_serve.draft.base import Guess
from spec_serve.draft.follow import (
    LONGEST,
    THEN,
    Follower,
    by_class,
    chances,
    copied,
    length_class,
)

_FACTOR = 0x9E3779B97F4A7C15  # the golden ratio as a 64-bit fraction: spreads small integers well
_MASK = (1 << 64) - 1
_LOW = (1 << 32) - 1  # the tables keep the low half of a place; comparing tokens finds out the rest
_END = -1  # stands between two texts

# Share of first tokens that proved right by how many before them agree (code and prose against a
# corpus of other code and prose; code served before in another version).
_FOUND = by_class(0.05, 0.25, 0.40, 0.40, 0.40, 0.50, 0.60, 0.90, 0.97)
_DOUBTFUL = (0.45, 0.60, 0.75, 0.85)  # the next ones, as long as no copy is known


class SharedCorpus:
    """The last `capacity` tokens of finished texts, indexed by their n-grams of every `WIDTHS`.

    A ring of tokens and one direct-mapped table per width, hash of an n-gram -> the latest place
    behind it. Entries that collided or outlived their text are found out by comparing tokens, so
    nothing has to be removed when the ring comes around. A full corpus finds about 98 of 100 places
    it holds. Memory: 36 to 68 bytes per token of capacity, from the start.

    Source: the constant-cost n-gram table of llama.cpp, with verification of the match.
    """

    WIDTHS = (8, 4)

    def __init__(self, capacity: int = 1 << 16) -> None:
        assert capacity > max(self.WIDTHS)
        self.capacity = capacity
        self._ring = np.full(capacity, _END, dtype=np.int32)
        self._written = 0
        self._bits = max((4 * capacity - 1).bit_length(), 8)
        self._tables = tuple(np.zeros(1 << self._bits, dtype=np.uint32) for _ in self.WIDTHS)

    @property
    def size(self) -> int:
        """Tokens held, one mark per text included."""
        return min(self._written, self.capacity)

    @property
    def nbytes(self) -> int:
        return int(self._ring.nbytes) + sum(int(table.nbytes) for table in self._tables)

    def add(self, tokens: Sequence[int]) -> None:
        """A finished text; of one that is longer than the corpus, the end."""
        text = np.asarray(tokens[-(self.capacity - 1) :], dtype=np.int64)
        if len(text) == 0:
            return
        start = self._written
        places = np.arange(start, start + len(text) + 1) % self.capacity
        self._ring[places[:-1]] = text
        self._ring[places[-1]] = _END
        self._written = start + len(text) + 1
        keys = text.astype(np.uint64)
        for width, table in zip(self.WIDTHS, self._tables, strict=True):
            count = len(text) - width + 1
            if count < 1:
                continue
            mixed = np.zeros(count, dtype=np.uint64)
            for i in range(width):  # wraps around at 64 bits, as _slot does
                mixed = (mixed + keys[i : i + count] + np.uint64(1)) * np.uint64(_FACTOR)
                mixed ^= mixed >> np.uint64(29)
            slots = (mixed >> np.uint64(64 - self._bits)).astype(np.int64)
            table[slots] = np.arange(start + width, start + width + count) & _LOW  # the last stays

    def _slot(self, tokens: Sequence[int]) -> int:
        mixed = 0
        for token in tokens:
            mixed = (mixed + token + 1) * _FACTOR & _MASK
            mixed ^= mixed >> 29
        return mixed >> (64 - self._bits)

    def find(self, tail: Sequence[int]) -> tuple[int, int]:
        """The latest place behind the longest indexed end of `tail`: (place, tokens that agree).

        (0, 0) if there is none.
        """
        written = self._written
        oldest = max(written - self.capacity, 0)
        for width, table in zip(self.WIDTHS, self._tables, strict=True):
            if len(tail) < width:
                continue
            place = written - (written - int(table[self._slot(tail[-width:])]) & _LOW)
            if place - width < oldest:
                continue
            agreed = self._agreed(tail, place, oldest)
            if agreed >= width:
                return place, agreed
        return 0, 0

    def _agreed(self, tail: Sequence[int], place: int, oldest: int) -> int:
        most = min(len(tail), place - oldest)
        before = self._read(place - most, most)
        agreed = 0
        while agreed < most and before[-1 - agreed] == tail[-1 - agreed]:
            agreed += 1
        return agreed

    def _read(self, place: int, count: int) -> list[int]:
        start = place % self.capacity
        piece: list[int] = self._ring[start : start + count].tolist()
        if len(piece) < count:
            piece += self._ring[: count - len(piece)].tolist()
        return piece

    def read(self, place: int, count: int) -> list[int]:
        """At most `count` tokens from a place on; stops at the end of its text."""
        if not max(self._written - self.capacity, 0) <= place < self._written:
            return []
        tokens = self._read(place, min(count, self._written - place))
        return tokens[: tokens.index(_END)] if _END in tokens else tokens


class Corpora:
    """One corpus per salt; the least recently used salts are forgotten.

    capacity: tokens per salt. salts: how many are kept.
    """

    def __init__(self, capacity: int = 1 << 16, salts: int = 16) -> None:
        assert salts > 0
        self._capacity = capacity
        self._salts = salts
        self._of: OrderedDict[str, SharedCorpus] = OrderedDict()

    def __len__(self) -> int:
        return len(self._of)

    def of(self, salt: str) -> SharedCorpus:
        """The corpus of a salt, an empty one if it has none yet."""
        corpus = self._of.get(salt)
        if corpus is None:
            corpus = self._of[salt] = SharedCorpus(self._capacity)
            if len(self._of) > self._salts:
                self._of.popitem(last=False)
        else:
            self._of.move_to_end(salt)
        return corpus


class Shared:
    """The matcher of one row in the corpus of its salt.

    Once found, a served text is followed through local changes; the row holds a copy of the piece
    it follows, so that later texts may overwrite it.
    """

    name = "shared"
    TAIL = 32  # tokens compared; as long as the longest class of matches
    PIECE = 512  # tokens of a served text copied at a time
    COPY = 8  # a match this long makes the row leave a copy it is out of step with
    KNOWN = 16  # a copy followed for so long is looked for again when the row leaves it

    __slots__ = ("_corpus", "_follower", "_known", "_tail")

    def __init__(self, corpus: SharedCorpus) -> None:
        self._corpus = corpus
        self._tail: list[int] = []
        self._follower = Follower([])
        self._known = 0

    def extend(self, tokens: Sequence[int]) -> None:
        tail, follower = self._tail, self._follower
        tail += tokens[-self.TAIL :]
        del tail[: -self.TAIL]
        if not follower.lost:
            for token in tokens[-self.PIECE :]:
                follower.advance(token)
        if follower.settled:
            self._known = max(self._known, follower.agreed)
            if follower.at < len(follower.text):
                return
            follower.leave()  # at the end of the piece
        elif self._known < self.KNOWN:
            follower.leave()
        place, agreed = self._corpus.find(tail)
        if agreed >= self.COPY or (agreed and follower.lost):
            before = tail[-min(agreed, Follower.BEHIND) :]
            follower.text = before + self._corpus.read(place, self.PIECE)
            follower.start(len(before), agreed)
            self._known = agreed

    def behind(self, ahead: Sequence[int], limit: int) -> list[Guess]:
        follower = self._follower
        place = follower.past(ahead)
        tokens = follower.text[place : place + limit] if place >= 0 else []
        agreed = follower.agreed + len(ahead)
        if not tokens:
            place, agreed = self._corpus.find([*self._tail, *ahead][-self.TAIL :])
            tokens = self._corpus.read(place, limit) if agreed else []
        if not tokens:
            return []
        agreed = min(agreed, LONGEST)
        then = THEN if self._known >= self.KNOWN else _DOUBTFUL
        probs = chances(_FOUND[agreed], then, len(tokens))
        return [Guess(tokens, probs, f"{self.name}:{length_class(agreed)}")]

    def guess(self, limit: int) -> list[Guess]:
        then = THEN if self._known >= self.KNOWN else _DOUBTFUL
        return copied(self._follower, limit, self.name, _FOUND, then)
