"""One choice's way through its constraint: masks for the nodes of its tree, and where it ends.

The matcher moves by verified tokens only. Each step a copy of it walks the guesses depth first:
what may not follow is pruned, and every node that is left gets its mask: at once where guesses hang
below it, later where none do, as only what is drawn there needs it. Nothing a guess does can touch
the choice itself, so what a choice becomes doesn't depend on what was guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import NamedTuple

from spec_serve.draft.mix import Candidates
from spec_serve.spec.bounds import Counted
from spec_serve.spec.compiler import Compiled
from spec_serve.spec.grammar import Mask, Matcher, MatchError
from spec_serve.spec.request import Constrained
from spec_serve.spec.validity import valid

SOURCE = "grammar"  # name of the draft source: tokens there is no choice about
WIDER = 2  # guesses looked at, as a multiple of those that may be verified
WITHIN_S = 0.005  # for the masks of one choice's guesses; others wait meanwhile


class _Place(NamedTuple):
    """What is known of a node. ahead: tokens that must follow it, one after the other (empty where
    there is a choice, or bounds have a say). mask: what may follow; unless `found`, the matcher
    still has to be asked for it. failed: what it gave up with."""

    ahead: Sequence[int]
    mask: Mask | None
    found: bool = True
    matcher: Matcher | None = None
    counted: Counted | None = None
    failed: str = ""


_END = _Place((), None)


class Walk:
    """A choice's place in its constraint. A mask None means that the choice ends there.

    ends: ids that may end it; the model's own and control tokens among them can be chosen where the
    text is complete, others are text that happens to end it. over: nothing can follow.
    failed: what the matcher gave up with, "" = it has not.
    """

    __slots__ = (
        "_children", "_counted", "_ends", "_known", "_matcher", "_nodes", "_root", "_until",
        "compiled", "failed", "forced", "over", "tokens",
    )  # fmt: skip

    def __init__(self, compiled: Compiled, ends: Iterable[int]) -> None:
        self.compiled = compiled
        lexicon = compiled.grammar.lexicon
        self._matcher = compiled.grammar.start()
        bounds = compiled.bounds
        self._counted = bounds.start if bounds is not None else Counted()
        spelling = lexicon.spelling
        own = [
            i for i in ends
            if i < lexicon.size and (i in spelling.eos_ids or spelling.is_special(i))
        ]  # fmt: skip
        self._ends = lexicon.bits(own)
        self._known = frozenset(own)
        self._root = _END
        self._nodes: dict[int, _Place] = {}  # by candidate
        self._children: dict[tuple[int, int], int] = {}
        self._until = 0.0
        self.tokens: list[int] = []
        self.over = False
        self.failed = ""
        self.forced = 0
        self._look()

    # ---- verified tokens

    def take(self, tokens: Sequence[int]) -> int:
        """Tokens that were chosen, in order; how many of them count, as the choice may end."""
        at, place = -1, self._root
        for count, token in enumerate(tokens, start=1):
            if place.ahead or (place.mask is not None and _single(place.mask)):
                self.forced += 1
            if token in self._known:
                self.over = True
                return count
            self.tokens.append(token)
            try:
                taken = self._matcher.advance(token)
            except MatchError as error:
                self.failed, taken = str(error), True
            assert taken, "a token was chosen that its mask forbids"
            if self.compiled.bounds is not None:
                self._counted = self.compiled.bounds.take(self._counted, token)
            at = self._children.get((at, token), -2)
            if self.failed or at < 0:
                self._look()
                place, at = self._root, -2
            else:
                place = self._asked(at)
                self.failed, self.over = place.failed, place.mask is None
            if self.over:
                return count
        self._root = place
        self._nodes, self._children = {}, {}
        return len(tokens)

    def _look(self) -> None:
        """What may follow everything taken; forgets the guesses."""
        self._nodes, self._children = {}, {}
        self._root = _END
        if not self.failed:
            try:
                self._root = self._place(self._matcher, self._counted)
            except MatchError as error:
                self.failed = str(error)
        self.over = self._root.mask is None

    def _place(self, matcher: Matcher, counted: Counted, asked: bool = True) -> _Place:
        """What may follow here. asked: its mask is wanted now, whatever it takes."""
        if self.compiled.bounds is None:
            # Cheaper than the mask, which holds exactly the first of them.
            ahead = matcher.forced()
            if ahead:
                return _Place(ahead, self._alone(ahead[0]))
            if not asked:
                return _Place((), None, False, matcher.copy(), counted)
        return _Place((), self._mask(matcher, counted))

    def _asked(self, node: int) -> _Place:
        """A candidate's place, its mask found."""
        place = self._nodes[node]
        if not place.found:
            assert place.matcher is not None and place.counted is not None
            try:
                place = _Place((), self._mask(place.matcher, place.counted))
            except MatchError as error:  # matters only if the choice comes here
                place = _END._replace(failed=str(error))
            self._nodes[node] = place
        return place

    def _alone(self, token: int) -> Mask:
        return self.compiled.grammar.lexicon.bits((token,))

    def _mask(self, matcher: Matcher, counted: Counted) -> Mask | None:
        mask = matcher.allowed()
        bounds = self.compiled.bounds
        if bounds is not None:
            bounds.limit(counted, mask)
        if not mask.any():
            return None
        if matcher.complete and (bounds is None or bounds.may_end(counted)):
            mask |= self._ends
        return mask

    @property
    def complete(self) -> bool:
        """Whether the text fits, as far as it goes."""
        bounds = self.compiled.bounds
        enough = bounds is None or bounds.may_end(self._counted)
        return not self.failed and enough and self._matcher.complete

    @property
    def spent(self) -> bool:
        """Whether a bound, not the grammar, leaves room for nothing more."""
        bounds = self.compiled.bounds
        return bounds is not None and not self.failed and bounds.spent(self._counted)

    def outcome(self, cut: bool) -> Constrained:
        """What became of it. cut: a stop string took something of the text away."""
        grammar = self.compiled.grammar
        complete = self.complete and not cut
        lexicon = grammar.lexicon
        fits = None
        if complete and grammar.schema is not None and not self.compiled.constraint.after:
            fits = not grammar.ignored or valid(
                b"".join(lexicon.tokens[i] for i in self.tokens), grammar.schema
            )
        return Constrained(complete, grammar.ignored, fits, self.forced)

    # ---- guesses

    def forced_run(self, most: int) -> list[int]:
        """Tokens there is no choice about, `most` at most."""
        root = self._root
        if root.ahead or root.mask is None or not _single(root.mask):
            return list(root.ahead[:most])
        return self._matcher.copy().forced()[:most]

    def prune(self, guesses: Candidates, limit: int, deepest: int) -> Candidates:
        """What of the guesses may follow; where a path of them leads to tokens there is no choice
        about, these are added.

        limit: guesses that may be verified. deepest: how deep tokens are added. A grammar whose
        masks take long leaves some guesses unlooked at, which are dropped.
        """
        kept = Candidates()
        self._nodes, self._children = {}, kept.children
        if self._root.mask is None:
            return kept
        below: dict[int, list[int]] = {}
        for i in guesses.order()[: WIDER * limit]:
            below.setdefault(guesses.parents[i], []).append(i)
        self._until = perf_counter() + WITHIN_S
        with suppress(MatchError):  # the copy gave up; what was found before holds
            self._descend(
                self._matcher.copy(), self._counted, self._root, -1, -1,
                guesses, below, kept, deepest,
            )  # fmt: skip
        kept.settle()
        return kept

    def _descend(
        self, matcher: Matcher, counted: Counted, place: _Place, old: int, new: int,
        guesses: Candidates, below: dict[int, list[int]], kept: Candidates, deepest: int,
    ) -> None:  # fmt: skip
        bounds = self.compiled.bounds
        assert place.mask is not None
        for i in below.get(old, ()):
            token = guesses.tokens[i]
            if not _holds(place.mask, token):
                continue
            if perf_counter() > self._until:
                return
            if token in self._known:
                self._nodes[kept.put(new, token, guesses.chance[i], guesses.kinds[i])] = _END
                continue
            if not matcher.advance(token):
                continue
            after = counted if bounds is None else bounds.take(counted, token)
            rest = place.ahead[1:]
            if rest:
                found = _Place(rest, self._alone(rest[0]))
            else:
                found = self._place(matcher, after, i in below)
            at = kept.put(new, token, guesses.chance[i], guesses.kinds[i])
            self._nodes[at] = found
            if found.mask is not None:
                size = len(kept)
                self._descend(matcher, after, found, i, at, guesses, below, kept, deepest)
                if len(kept) == size and kept.depths[at] < deepest:
                    self._force(matcher, after, at, kept, deepest)
            matcher.back()

    def _force(
        self, matcher: Matcher, counted: Counted, at: int, kept: Candidates, deepest: int
    ) -> None:
        """Add the tokens that must follow below node `at`."""
        place, bounds = self._nodes[at], self.compiled.bounds
        ahead = place.ahead
        if not ahead:
            if bounds is None or place.mask is None or not _single(place.mask):
                return
            ahead = matcher.copy().forced()
        matcher = matcher.copy()
        for k, token in enumerate(ahead, start=1):
            if perf_counter() > self._until:
                return
            if kept.depths[at] >= deepest or place.mask is None or not _holds(place.mask, token):
                return
            if token in self._known or not matcher.advance(token):
                return
            counted = counted if bounds is None else bounds.take(counted, token)
            if bounds is None and ahead[k:]:
                place = _Place(ahead[k:], self._alone(ahead[k]))
            else:
                place = self._place(matcher, counted, False)
            at = kept.put(at, token, 1.0, SOURCE)
            self._nodes[at] = place

    def known(self, nodes: Sequence[int]) -> dict[int, int]:
        """Where a single token can follow: the last given node is place 0, the candidates `nodes`
        are places 1 and following. Place -> that token."""
        places = [self._root, *(self._nodes[i] for i in nodes)]
        return singles([place.mask if place.found else None for place in places])

    def masks(self, nodes: Sequence[int]) -> list[Mask | None]:
        """Of the last given node, and of the candidates `nodes`. None = the choice ends there."""
        return [self._root.mask, *(self._asked(i).mask for i in nodes)]


def singles(masks: Sequence[Mask | None]) -> dict[int, int]:
    """Where a mask leaves a single token: its place among them -> that token."""
    found = {}
    for place, mask in enumerate(masks):
        token = -1 if mask is None else _only(mask)
        if token >= 0:
            found[place] = token
    return found


def _only(mask: Mask) -> int:
    """The token that alone is allowed; -1 where there is a choice."""
    (at,) = mask.nonzero()
    if len(at) != 1:
        return -1
    word = int(mask[at[0]])
    return -1 if word & (word - 1) else 64 * int(at[0]) + word.bit_length() - 1


def _single(mask: Mask) -> bool:
    """Whether one token alone is allowed."""
    return _only(mask) >= 0


def _holds(mask: Mask, token: int) -> bool:
    word = token >> 6
    return word < len(mask) and bool(int(mask[word]) >> (token & 63) & 1)
