"""One choice's way through its constraint: masks for the nodes of its tree, and where it ends.

The matcher moves by verified tokens only. Each step a copy of it walks the guesses depth first:
what may not follow is pruned, and every node that is left gets its mask. Nothing a guess does can
touch the choice itself, so what a choice becomes doesn't depend on what was guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from time import perf_counter

from spec_serve.draft.mix import Candidates
from spec_serve.spec.bounds import Counted
from spec_serve.spec.compiler import Compiled
from spec_serve.spec.grammar import Mask, Matcher, MatchError
from spec_serve.spec.request import Constrained
from spec_serve.spec.validity import valid

SOURCE = "grammar"  # name of the draft source: tokens there is no choice about
WIDER = 2  # guesses looked at, as a multiple of those that may be verified
WITHIN_S = 0.005  # for the masks of one choice's guesses; others wait meanwhile


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
        self._root: Mask | None = None
        self._nodes: dict[int, Mask | None] = {}  # by candidate
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
        at = -1
        mask = self._root
        for count, token in enumerate(tokens, start=1):
            if mask is not None and _single(mask):
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
            if self.failed or count == len(tokens) or at < 0:
                self._look()
                mask = self._root
            else:
                mask = self._nodes[at]
                self.over = mask is None
            if self.over:
                return count
        return len(tokens)

    def _look(self) -> None:
        """The mask behind everything taken; forgets the guesses."""
        self._nodes, self._children = {}, {}
        if not self.failed:
            try:
                self._root = self._mask(self._matcher, self._counted)
            except MatchError as error:
                self.failed, self._root = str(error), None
        else:
            self._root = None
        self.over = self._root is None

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
        if self._root is None or not _single(self._root):
            return []
        return self._matcher.copy().forced()[:most]

    def prune(self, guesses: Candidates, limit: int, deepest: int) -> Candidates:
        """What of the guesses may follow, each with a mask; where a path of them leads to tokens
        there is no choice about, these are added.

        limit: guesses that may be verified. deepest: how deep tokens are added. A grammar whose
        masks take long leaves some guesses unlooked at, which are dropped.
        """
        kept = Candidates()
        self._nodes, self._children = {}, kept.children
        if self._root is None:
            return kept
        below: dict[int, list[int]] = {}
        for i in guesses.order()[: WIDER * limit]:
            below.setdefault(guesses.parents[i], []).append(i)
        matcher = self._matcher.copy()
        self._until = perf_counter() + WITHIN_S
        with suppress(MatchError):  # the copy gave up; what was found before holds
            self._descend(matcher, self._counted, self._root, -1, -1, guesses, below, kept, deepest)
        kept.settle()
        return kept

    def _descend(
        self, matcher: Matcher, counted: Counted, mask: Mask, old: int, new: int,
        guesses: Candidates, below: dict[int, list[int]], kept: Candidates, deepest: int,
    ) -> None:  # fmt: skip
        bounds = self.compiled.bounds
        for i in below.get(old, ()):
            token = guesses.tokens[i]
            if not _holds(mask, token):
                continue
            if perf_counter() > self._until:
                return
            if token in self._known:
                self._nodes[kept.put(new, token, guesses.chance[i], guesses.kinds[i])] = None
                continue
            if not matcher.advance(token):
                continue
            after = counted if bounds is None else bounds.take(counted, token)
            found = self._mask(matcher, after)
            at = kept.put(new, token, guesses.chance[i], guesses.kinds[i])
            self._nodes[at] = found
            if found is not None:
                size = len(kept)
                self._descend(matcher, after, found, i, at, guesses, below, kept, deepest)
                if len(kept) == size and kept.depths[at] < deepest and _single(found):
                    self._force(matcher, after, at, kept, deepest)
            matcher.back()

    def _force(
        self, matcher: Matcher, counted: Counted, at: int, kept: Candidates, deepest: int
    ) -> None:
        """Add the tokens that must follow below node `at`."""
        matcher, bounds = matcher.copy(), self.compiled.bounds
        mask = self._nodes[at]
        for token in matcher.forced():
            if perf_counter() > self._until:
                return
            if kept.depths[at] >= deepest or mask is None or not _holds(mask, token):
                return
            if token in self._known or not matcher.advance(token):
                return
            counted = counted if bounds is None else bounds.take(counted, token)
            at = kept.put(at, token, 1.0, SOURCE)
            mask = self._nodes[at] = self._mask(matcher, counted)

    def masks(self, nodes: Sequence[int]) -> list[Mask | None]:
        """Of the last given node, and of the candidates `nodes`."""
        return [self._root, *(self._nodes[i] for i in nodes)]


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
