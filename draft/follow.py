"""A finger in a text that is being copied, and the prediction a client may send along.

The finger survives local changes: after a token that differs it looks for the place nearby where
the copy goes on, so that a renamed variable or an inserted line costs a token or two. Knows token
ids only; what the text is (a prompt, a prediction) is the owner's business.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

from spec_serve.draft.base import Guess

CLASSES = ("0", "1", "2", "3", "4-5", "6-8", "9-15", "16-31", "32+")
_BOUNDS = (1, 2, 3, 4, 6, 9, 16, 32)
LONGEST = _BOUNDS[-1]
LENGTH_CLASS = tuple(
    CLASSES[sum(length >= bound for bound in _BOUNDS)] for length in range(LONGEST + 1)
)


def length_class(length: int) -> str:
    """Class of a match length: "0", "1", "2", "3", "4-5", "6-8", "9-15", "16-31", "32+"."""
    return LENGTH_CLASS[length if length < LONGEST else -1]


class Follower:
    """Where in `text` the copy is expected to go on, if there is one.

    at: index of the next expected token, -1 = out of step. agreed: tokens in a row that agreed so
    far. The place where the copy last was in step for certain stays `home` until `SETTLED` tokens
    agree again, so that a wrong re-alignment is taken back. What was replaced by what is kept until
    it proves wrong: whoever renames a variable renames it again.
    """

    SETTLED = 4
    BEHIND = 8  # tokens before and behind home that are searched
    AHEAD = 40
    PATIENCE = 32  # tokens until the copy counts as abandoned
    HOPE = 4  # tokens out of step during which an insertion or replacement is guessed
    EDIT = 8  # tokens of an edit worth keeping
    EDITS = 32

    __slots__ = ("_edits", "_home", "_off", "agreed", "at", "text")

    def __init__(self, text: list[int]) -> None:
        self.text = text  # may grow
        self._home = 0
        self._off: list[int] = []  # what came since home
        self._edits: dict[int, tuple[list[int], list[int]]] = {}  # by the first replaced token
        self.at = -1
        self.agreed = 0

    @property
    def home(self) -> int:
        """Index into the text where the copy was last in step for certain."""
        return self._home if self._off or self.at < 0 else self.at

    @property
    def settled(self) -> bool:
        """In step, and no doubt about it."""
        return self.at >= 0 and not self._off

    @property
    def lost(self) -> bool:
        """Neither in step nor close to a place where it was."""
        return self.at < 0 and not self._off

    def start(self, at: int, agreed: int) -> None:
        """The copy goes on with text[at], after `agreed` equal tokens."""
        self.at = self._home = at
        self.agreed = agreed
        self._off.clear()

    def leave(self) -> None:
        """The copy is over."""
        self.at = -1
        self._off.clear()

    def advance(self, token: int) -> None:
        """One more certain token of the copy."""
        at, off = self.at, self._off
        if at >= 0:
            if at < len(self.text) and self.text[at] == token:
                if token in self._edits and not off and self._edit(at):
                    del self._edits[token]  # left as it was this time
                self.at = at + 1
                self.agreed += 1
                if off:
                    if self.agreed >= self.SETTLED:
                        self._learn()
                        off.clear()
                    else:
                        off.append(token)
                return
            if not off:
                self._home = at
        elif not off:
            return
        off.append(token)
        edit = self._edit(self._home)
        if edit and off == edit[1][: len(off)]:
            whole = len(off) == len(edit[1])
            self.at, self.agreed = (self._home + len(edit[0]) if whole else -1), 0
        else:
            self.at, self.agreed = self._find()
        if len(off) > self.PATIENCE and self.at < 0:
            off.clear()

    def _edit(self, at: int) -> tuple[list[int], list[int]] | None:
        """The known edit of what stands at `at`."""
        text = self.text
        edit = self._edits.get(text[at]) if at < len(text) else None
        return edit if edit and text[at : at + len(edit[0])] == edit[0] else None

    def _learn(self) -> None:
        """In step again: keep what was put in the place of what."""
        old = self.text[self._home : self.at - self.agreed]
        new = self._off[: len(self._off) + 1 - self.agreed]
        if old and new and len(old) <= self.EDIT and len(new) <= self.EDIT:
            edits = self._edits
            edits.pop(old[0], None)
            edits[old[0]] = (old, new)
            if len(edits) > self.EDITS:
                del edits[next(iter(edits))]

    def _find(self) -> tuple[int, int]:
        """The place near home that the last tokens fit best: (index after it, tokens that fit)."""
        text, off, home = self.text, self._off, self._home
        token, expected = off[-1], home + len(off) - 1
        low = max(home - self.BEHIND, 0)
        window = text[low : min(home + self.AHEAD + len(off), len(text) - 1)]
        best, found, fits = -1 << 30, -1, 0
        start = 0
        for _ in range(window.count(token)):
            start = window.index(token, start) + 1
            place = low + start - 1
            fit = 1
            while fit < len(off) and fit <= place and off[-1 - fit] == text[place - fit]:
                fit += 1
            score = 8 * fit - abs(place - expected)
            if score > best:
                best, found, fits = score, place + 1, fit
        return found, fits

    def expect(self) -> list[tuple[int, int]]:
        """Where the copy may go on: (index into the text, tokens that agreed), best first.

        In step that is one place. Just out of step there are two: as if all tokens since had been
        put in between (-1 agreed), and as if each had replaced one (-2).
        """
        if self.at >= 0:
            return [(self.at, self.agreed)]
        if not self._off or len(self._off) > self.HOPE:
            return []
        return [(self._home, -1), (self._home + len(self._off), -2)]

    def past(self, tokens: Sequence[int]) -> int:
        """The place behind `tokens` if the copy goes on with them; -1 if it doesn't."""
        end = self.at + len(tokens)
        return end if self.at >= 0 and self.text[self.at : end] == list(tokens) else -1

    def edited(self, limit: int) -> tuple[list[int], int] | None:
        """How the copy goes on, at most `limit` tokens, if the edits seen so far are made again.

        Returns the tokens and the index of the first that an edit changed; None if none did.
        """
        edits, text = self._edits, self.text
        if not edits or limit < 1:
            return None
        tokens: list[int] = []
        at, first = self.at, limit
        if at < 0:  # perhaps in the middle of one
            edit, done = self._edit(self._home), len(self._off)
            if not edit or not done or self._off != edit[1][:done]:
                return None
            tokens, at, first = edit[1][done:], self._home + len(edit[0]), 0
        elif edits.keys().isdisjoint(text[at : at + limit]):
            return None
        while len(tokens) < limit and at < len(text):
            edit = self._edit(at)
            if edit is None:
                tokens.append(text[at])
                at += 1
            else:
                first = min(first, len(tokens))
                tokens += edit[1]
                at += len(edit[0])
        return (tokens[:limit], first) if first < limit else None


def by_class(*values: float) -> tuple[float, ...]:
    """One value per length class, spread to one per match length 0..32."""
    return tuple(values[CLASSES.index(length_class(n))] for n in range(LONGEST + 1))


def chances(first: float, rest: Sequence[float], count: int) -> list[float]:
    """`count` probabilities: first, then those of `rest`, its last one for ever."""
    probs = [first, *rest[: max(count - 1, 0)]][:count]
    return probs + [rest[-1]] * (count - len(probs))


INSERTED, REPLACED = 0.15, 0.08  # back in step right after tokens put in, after tokens replaced
AGAIN = 0.65  # an edit is made once more
BACK = (0.85, 0.90, 0.93)  # in step again: the next ones
THEN = (0.88, 0.90, 0.92, 0.94, 0.96)  # after a token of a copy that was right


def copied(
    follower: Follower,
    limit: int,
    name: str,
    first: Sequence[float],
    then: Sequence[float] = THEN,
) -> list[Guess]:
    """What a follower expects, as guesses of at most `limit` tokens; best first.

    first[n]: probability of the first token after n that agreed, n = 0..32. then: of the next
    ones, each given that those before are right. All chains begin with different tokens, save the
    one with known edits, which repeats the first up to an edit.
    """
    guesses: list[Guess] = []
    for at, agreed in follower.expect():
        tokens = follower.text[at : at + limit]
        if not tokens or (guesses and tokens[0] == guesses[0].tokens[0]):
            continue
        if agreed >= 0:
            probs = chances(first[min(agreed, LONGEST)], then, len(tokens))
            guesses.append(Guess(tokens, probs, f"{name}:{length_class(agreed)}"))
        else:
            sort, chance = ("insert", INSERTED) if agreed == -1 else ("replace", REPLACED)
            guesses.append(Guess(tokens, chances(chance, BACK, len(tokens)), f"{name}:{sort}"))
    edited = follower.edited(limit)
    if edited:
        tokens, changed = edited
        probs = chances(first[min(follower.agreed, LONGEST)], then, changed)
        probs += chances(AGAIN, BACK, len(tokens) - changed)
        guess = Guess(tokens, probs, f"{name}:edited")
        guesses.insert(0 if changed == 0 else len(guesses), guess)
    return guesses


# Shares of first tokens of a prediction that proved right, by how many agreed before (edited code
# and summaries, chains of 16).
_FIRST = by_class(0.60, 0.50, 0.80, 0.80, 0.85, 0.92, 0.94, 0.96, 0.98)


class Prediction:
    """The output a client expects (Predicted Outputs), followed from where the output stands.

    skip: tokens of the prompt, told first and not part of the predicted text. `hits` counts the
    output tokens that were where the prediction was expected to go on.
    """

    name = "prediction"
    NEAREST = 48  # places looked at per search
    CONTEXT = 3  # tokens that must fit to begin again far away

    __slots__ = ("_follower", "_places", "_skip", "_tail", "_text", "hits")

    def __init__(self, tokens: Sequence[int], skip: int = 0) -> None:
        self._text = list(tokens)
        self._skip = skip
        self._follower = Follower(self._text)
        self._follower.start(0, 0)
        self._tail: list[int] = []
        self.hits = 0
        places: dict[int, list[int]] = {}
        for place, token in enumerate(self._text):
            places.setdefault(token, []).append(place)
        self._places = places

    def extend(self, tokens: Sequence[int]) -> None:
        if self._skip:
            skipped = min(self._skip, len(tokens))
            self._skip -= skipped
            tokens = tokens[skipped:]
        follower, text, tail = self._follower, self._text, self._tail
        for token in tokens:
            at = follower.at
            self.hits += 0 <= at < len(text) and text[at] == token
            follower.advance(token)
            tail.append(token)
            if follower.at < 0:
                self._search()
        del tail[: -self.CONTEXT]

    def _search(self) -> None:
        """Look for the last tokens anywhere in the prediction, nearest to the finger first."""
        tail, text, context = self._tail[-self.CONTEXT :], self._text, self.CONTEXT
        if len(tail) < context:
            return
        places = self._places.get(tail[-1])
        if not places:
            return
        finger = self._follower.home
        right = bisect_left(places, finger)
        left = right - 1
        for _ in range(self.NEAREST):
            if left < 0 and right >= len(places):
                return
            if left < 0 or (
                right < len(places) and places[right] - finger <= finger - places[left]
            ):
                place = places[right]
                right += 1
            else:
                place = places[left]
                left -= 1
            start = place + 1 - context
            if start >= 0 and text[start : place + 1] == tail:
                self._follower.start(place + 1, context)
                return

    def behind(self, ahead: Sequence[int], limit: int) -> list[Guess]:
        follower = self._follower
        place = follower.past(ahead)
        tokens = self._text[place : place + limit] if place >= 0 and not self._skip else []
        if not tokens:
            return []
        agreed = min(follower.agreed + len(ahead), LONGEST)
        probs = chances(_FIRST[agreed], THEN, len(tokens))
        return [Guess(tokens, probs, f"{self.name}:{length_class(agreed)}")]

    def guess(self, limit: int) -> list[Guess]:
        if self._skip:
            return []
        return copied(self._follower, limit, self.name, _FIRST)
