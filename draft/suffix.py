"""The text of one row as an online suffix automaton, for finding where its end occurred before.

Knows token ids only: every earlier occurrence of every suffix, how often it was seen, where it was
seen last and what followed it. It makes no guesses and knows nothing of rows or of probabilities.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain, islice

ROOT = 0  # the state of the empty string


class SuffixAutomaton:
    """All substrings of a growing text; amortised O(1) per token, at most two states per token.

    A state stands for substrings that end at the same places. `link` leads to the longest suffix
    that ends at more places, so that link[last] is the longest suffix of the text that occurred
    before. count and recent (number of tokens up to and including the latest occurrence) are kept
    for the `TOUCHED` longest repeated suffixes of each position: beyond that (only in text that
    repeats itself within itself many times) they may lag, but still name a real occurrence.

    Memory: about 0.5 KB per token. Source: Blumer et al. 1985 (the online construction).
    """

    TOUCHED = 24
    FORKS = 64

    __slots__ = ("_branches", "_count", "_last", "_length", "_link", "_recent", "text")

    def __init__(self) -> None:
        self.text: list[int] = []
        self._branches: list[dict[int, int]] = [{}]
        self._link = [-1]
        self._length = [0]
        self._count = [0]
        self._recent = [0]
        self._last = ROOT

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        branches, link, length = self._branches, self._link, self._length
        count, recent, last = self._count, self._recent, self._last
        size, touched = len(self.text), self.TOUCHED
        for token in tokens:
            # The suffixes that end here are booked one token late: until then `recent` names
            # the occurrence before this one, which is what a guess wants to continue from.
            state, left = link[last], touched
            while state > 0 and left:
                count[state] += 1
                recent[state] = size
                state = link[state]
                left -= 1
            size += 1
            new = len(branches)
            branches.append({})
            length.append(size)
            count.append(1)
            recent.append(size)
            state = last
            last = new
            while state >= 0:
                out = branches[state]
                if token in out:
                    break
                out[token] = new
                state = link[state]
            else:
                link.append(ROOT)
                continue
            seen = out[token]
            if length[seen] == length[state] + 1:
                link.append(seen)
                continue
            clone = new + 1  # the shorter suffixes of `seen` end here too from now on, it does not
            link.append(clone)
            branches.append(branches[seen].copy())
            length.append(length[state] + 1)
            link.append(link[seen])
            count.append(count[seen])
            recent.append(recent[seen])
            link[seen] = clone
            while state >= 0 and branches[state].get(token) == seen:
                branches[state][token] = clone
                state = link[state]
        self._last = last
        self.text.extend(tokens)

    def longest(self) -> int:
        """State of the longest suffix of the text that occurred before; ROOT if there is none."""
        return max(self._link[self._last], ROOT)

    def shorter(self, state: int) -> int:
        """State of the longest suffix of `state` that ends at more places."""
        return max(self._link[state], ROOT)

    def length(self, state: int) -> int:
        """Tokens of the longest string of a state."""
        return self._length[state]

    def walk(self, tokens: Sequence[int]) -> tuple[int, int]:
        """State of the longest end of the text and then `tokens` that occurred in the text, and how
        long that end is; the text stays as it is. (ROOT, 0) if there is none."""
        branches, link = self._branches, self._link
        state = self.longest()
        length = self._length[state]
        for token in tokens:
            while state != ROOT and token not in branches[state]:
                state = link[state]
                length = self._length[state]
            after = branches[state].get(token)
            state, length = (ROOT, 0) if after is None else (after, length + 1)
        return state, length

    def occurrence(self, state: int) -> int:
        """End (exclusive index into the text) of the latest earlier occurrence of a state."""
        return self._recent[state]

    def continuations(self, state: int) -> list[tuple[int, int, int, int]]:
        """What followed the strings of a state: (times seen, latest end, token, next state).

        The most frequent first, the latest first among equals. `latest end` counts the token. Of
        more than `FORKS` tokens only those seen first (they tend to be the frequent ones) and
        those seen last are looked at.
        """
        found = self._seen_after(self._branches[state])
        if len(found) > 1:
            found.sort(reverse=True)
        return found

    def _seen_after(self, out: dict[int, int]) -> list[tuple[int, int, int, int]]:
        count, recent = self._count, self._recent
        items: Iterable[tuple[int, int]] = out.items()
        if len(out) > self.FORKS:
            late = self.FORKS // 4
            items = chain(islice(items, self.FORKS - late), islice(reversed(out.items()), late))
        return [(count[q], recent[q], token, q) for token, q in items]

    def follow(self, state: int, limit: int) -> list[int]:
        """The at most `limit` likeliest tokens after a state, by majority at every fork.

        The path stops where the text ends.
        """
        branches, count = self._branches, self._count
        tokens: list[int] = []
        while len(tokens) < limit:
            if count[state] == 1:  # seen once: the rest of the text is the only continuation
                start = self._recent[state]
                tokens += self.text[start : start + limit - len(tokens)]
                break
            out = branches[state]
            if not out:
                break
            if len(out) == 1:
                ((token, state),) = out.items()
            else:
                _, _, token, state = max(self._seen_after(out))
            tokens.append(token)
        return tokens
