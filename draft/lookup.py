"""Look-ups on the host: the row's own text, and what the radix tree saw after the same tokens.

Each class is a `Source` of one row: it is told every certain token once and returns chains that may
follow, with its own estimate per token (measured on copied, edited and repeated text; the engine's
calibration by `kind` and depth takes over from there). Knows nothing of models, costs or trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from spec_serve.draft.base import Guess
from spec_serve.draft.follow import (
    AGAIN,
    BACK,
    INSERTED,
    LONGEST,
    REPLACED,
    Follower,
    by_class,
    chances,
    length_class,
)
from spec_serve.draft.suffix import ROOT, SuffixAutomaton

# Shares of guesses that proved right on edited code, further code, summaries and prose, with chains
# of 16: the first token by match length where one continuation was known, where several were (the
# most frequent of them), and of the others.
_SURE = by_class(0.05, 0.45, 0.52, 0.62, 0.66, 0.73, 0.82, 0.92, 0.98)
_SPLIT = by_class(0.05, 0.15, 0.21, 0.25, 0.33, 0.36, 0.40, 0.60, 0.80)
_OTHER = by_class(0.03, 0.06, 0.10, 0.10, 0.10, 0.10, 0.10, 0.12, 0.12)
_BACK = by_class(0.80, 0.27, 0.45, 0.60, 0.70, 0.75, 0.75, 0.80, 0.80)
# What follows right tokens is likelier than the longer match alone tells: this is a copy.
_AFTER = tuple(
    tuple(_SURE[min(length + 2 * i, LONGEST)] for i in range(1, 17))
    for length in range(LONGEST + 1)
)


class Ngram:
    """The row's own prompt and output: what followed the last tokens where they occurred before.

    The best chain continues the longest match, by majority at forks, and wraps around where it
    meets the end of the text (a period goes on). Others start with a different token: the next
    frequent one after the same match, the one after a shorter match, and where a copied passage
    was left by an edit, the place behind the edit. The last may share its beginning with another:
    the copied passage with the edits seen so far made again.

    burst: tokens indexed per call at most (under 1 us each); the rest waits for the next calls,
    during which there are no guesses. alternatives: chains besides the best and the edited one
    at most, counting places behind an edit.
    """

    name = "suffix"
    COPY = 8  # a match this long is a copy, and followed through edits from there on
    HINT = 3  # as is one this long where no other copy was left a moment ago

    __slots__ = ("_alternatives", "_automaton", "_burst", "_follower", "_waiting")

    def __init__(self, burst: int = 4096, alternatives: int = 3) -> None:
        assert burst > 0 and alternatives >= 0
        self._automaton = SuffixAutomaton()
        self._follower = Follower(self._automaton.text)
        self._burst = burst
        self._alternatives = alternatives
        self._waiting: list[int] = []

    @property
    def waiting(self) -> int:
        """Tokens told but not yet indexed."""
        return len(self._waiting)

    def extend(self, tokens: Sequence[int]) -> None:
        if self._waiting or len(tokens) > self._burst:
            self._waiting += tokens
            self._catch_up()
            return
        automaton, follower = self._automaton, self._follower
        automaton.extend(tokens)
        if not follower.lost:
            for token in tokens:
                follower.advance(token)
        if not follower.settled:
            match = automaton.longest()
            length = automaton.length(match)
            if length >= (self.HINT if follower.lost else self.COPY):
                follower.start(automaton.occurrence(match), length)

    def _catch_up(self) -> None:
        burst, waiting = self._burst, self._waiting
        self._waiting = []
        self.extend(waiting[:burst])
        self._waiting = waiting[burst:]

    def guess(self, limit: int) -> list[Guess]:
        if self._waiting:
            self._catch_up()
        if self._waiting or limit < 1:
            return []
        automaton, guesses, firsts = self._automaton, list[Guess](), set[int]()
        match = automaton.longest()
        if match != ROOT:
            found = automaton.continuations(match)
            table = _SPLIT if len(found) > 1 else _SURE
            guesses.append(self._chain(match, found[0], table, limit))
            firsts.add(found[0][2])
        self._resume(limit, guesses, firsts)
        wanted = self._alternatives + 1
        while match != ROOT and len(guesses) < wanted:
            for option in automaton.continuations(match):
                if option[2] not in firsts:
                    firsts.add(option[2])
                    guesses.append(self._chain(match, option, _OTHER, limit))
                    if len(guesses) >= wanted:
                        break
            match = automaton.shorter(match)
        guesses.sort(key=_first_chance, reverse=True)
        edited = self._follower.edited(limit)
        if edited:
            tokens, changed = edited
            agreed = min(self._follower.agreed, LONGEST)
            probs = chances(_SURE[agreed], _AFTER[agreed], changed)
            probs += chances(AGAIN, BACK, len(tokens) - changed)
            # Up to the edit it repeats another guess, which comes first and keeps its own kind.
            place = 0 if changed == 0 else len(guesses)
            guesses.insert(place, Guess(tokens, probs, "suffix:edited"))
        return guesses

    def behind(self, ahead: Sequence[int], limit: int) -> list[Guess]:
        if self._waiting or limit < 1:
            return []
        automaton = self._automaton
        match, length = automaton.walk(ahead)
        while match != ROOT:
            found = automaton.continuations(match)
            if found:
                tokens = [found[0][2], *automaton.follow(found[0][3], limit - 1)]
                length = min(length, LONGEST)
                table = _SPLIT if len(found) > 1 else _SURE
                probs = chances(table[length], _AFTER[length], len(tokens))
                return [Guess(tokens, probs, f"suffix:{length_class(length)}")]
            match = automaton.shorter(match)
            length = automaton.length(match)
        return []

    def _chain(
        self, match: int, option: tuple[int, int, int, int], table: Sequence[float], limit: int
    ) -> Guess:
        """The chain that begins with one continuation of a match."""
        automaton = self._automaton
        length = min(automaton.length(match), LONGEST)
        tokens = automaton.follow(option[3], limit - 1)
        tokens.insert(0, option[2])
        if len(tokens) < limit:  # met the end of the text: these tokens are its last period
            tokens = (tokens * (limit // len(tokens) + 1))[:limit]
        if table is _SURE:
            probs = chances(_SURE[length], _AFTER[length], limit)
            return Guess(tokens, probs, f"suffix:{length_class(length)}")
        probs = chances(table[length], _AFTER[max(length - 2, 0)], limit)
        sort = "split" if table is _SPLIT else "other"
        return Guess(tokens, probs, f"suffix:{length_class(length)}/{sort}")

    def _resume(self, limit: int, guesses: list[Guess], firsts: set[int]) -> None:
        """Behind an edit: the copied passage, where that is not what the match says anyway."""
        text = self._automaton.text
        for at, agreed in self._follower.expect():
            tokens = text[at : at + limit]
            if not tokens or tokens[0] in firsts:
                continue
            firsts.add(tokens[0])
            if agreed >= 0:
                kind = f"suffix:{length_class(agreed)}/back"
                chance = _BACK[min(agreed, LONGEST)]
            elif agreed == -1:
                kind, chance = "suffix:insert", INSERTED
            else:
                kind, chance = "suffix:replace", REPLACED
            guesses.append(Guess(tokens, chances(chance, BACK, len(tokens)), kind))


def _first_chance(guess: Guess) -> float:
    return guess.probs[0]


class RadixCursor(Protocol):
    """A row's place in the radix tree under one salt (see cache/radix.py)."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Walk on by these tokens."""
        ...

    def guess(self, limit: int) -> list[list[int]]:
        """Runs of at most `limit` tokens seen after exactly this path, latest used first."""
        ...


# Served text is often served again; once some of it agreed, it probably goes on.
_SERVED = by_class(0.50, 0.75, 0.85, 0.88, 0.90, 0.93, 0.95, 0.97, 0.98)
_ASIDE = 0.15  # another continuation than the one used last


class Continuations:
    """What other requests under the same salt went on with after exactly this row's tokens."""

    name = "radix"

    __slots__ = ("_agreed", "_best", "_cursor")

    def __init__(self, cursor: RadixCursor) -> None:
        self._cursor = cursor
        self._best: list[int] = []
        self._agreed = 0

    def extend(self, tokens: Sequence[int]) -> None:
        best = self._best
        fits = 0
        for token, guessed in zip(tokens, best, strict=False):
            if token != guessed:
                break
            fits += 1
        self._agreed = self._agreed + fits if fits == min(len(tokens), len(best)) else 0
        self._best = best[len(tokens) :] if self._agreed else []
        self._cursor.extend(tokens)

    def behind(self, ahead: Sequence[int], limit: int) -> list[Guess]:
        known = len(ahead)
        for run in self._cursor.guess(known + limit):
            if len(run) > known and run[:known] == list(ahead):
                agreed = min(self._agreed + known, LONGEST)
                probs = chances(_SERVED[agreed], _SERVED[min(agreed + 1, LONGEST) :], limit)
                tokens = run[known : known + limit]
                kind = f"radix:{length_class(agreed)}"
                return [Guess(tokens, probs[: len(tokens)], kind)]
        return []

    def guess(self, limit: int) -> list[Guess]:
        if limit < 1:
            return []
        runs = [run[:limit] for run in self._cursor.guess(limit) if run]
        if not runs:
            self._best, self._agreed = [], 0
            return []
        agreed = self._agreed if self._best[:1] in ([], runs[0][:1]) else 0
        self._agreed, self._best = agreed, runs[0]
        guesses: list[Guess] = []
        firsts: set[int] = set()
        for run in runs:
            if run[0] in firsts:
                continue
            firsts.add(run[0])
            if guesses:
                guesses.append(Guess(run, chances(_ASIDE, _SERVED[1:], len(run)), "radix:other"))
                continue
            chance = _SERVED[min(agreed, LONGEST)] * (0.8 if len(runs) > 1 else 1.0)
            probs = chances(chance, _SERVED[min(agreed + 1, LONGEST) :], len(run))
            guesses.append(Guess(run, probs, f"radix:{length_class(agreed)}"))
        return guesses
