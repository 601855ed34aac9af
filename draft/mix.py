"""One tree out of several sources' guesses.

Each row collects candidates: a device drafter's tree and the host look-ups' chains are merged by
common prefixes below the newest token, every node with the calibrated probability that it lies on
the accepted path. Trimming keeps the best nodes; as a child is never likelier than its parent, what
remains is a tree. Which drafter made a node matters only for calibration and reports.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import exp

from spec_serve.cache.tree import TokenTree
from spec_serve.draft.base import Guess
from spec_serve.draft.budget import Calibration

LIKELY = 0.985  # no guess counts as certain


class Trust:
    """How much better or worse guesses fare on one row than the calibration says."""

    __slots__ = ("_expected", "_hits")

    def __init__(self) -> None:
        self._hits = 4.0
        self._expected = 4.0

    @property
    def factor(self) -> float:
        return min(max(self._hits / self._expected, 0.25), 1.5)

    def observe(self, expected: float, hit: bool) -> None:
        """A guess believed right with probability `expected` proved right or wrong."""
        self._hits = self._hits * 0.96 + 0.16 + hit
        self._expected = self._expected * 0.96 + 0.16 + expected


class Candidates:
    """Guesses below one row's newest token; node i's parent is -1 (the newest token) or before i.

    chance[i]: probability that node i is right given its parent; reach[i]: that it lies on the
    accepted path; kinds[i]: the calibration kind of the source that proposed it first.
    children: (parent, token) -> node. floor: look-ups' chains end where reach falls below it.
    """

    __slots__ = ("chance", "children", "depths", "floor", "kinds", "parents", "reach", "tokens")

    def __init__(self, floor: float = 0.0) -> None:
        self.floor = floor
        self.tokens: list[int] = []
        self.parents: list[int] = []
        self.depths: list[int] = []
        self.chance: list[float] = []
        self.reach: list[float] = []
        self.kinds: list[str] = []
        self.children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def put(self, parent: int, token: int, chance: float, kind: str) -> int:
        """The child of `parent` with this token; made, or made as likely as `chance`."""
        node = self.children.get((parent, token))
        reach = chance if parent < 0 else chance * self.reach[parent]
        if node is None:
            node = self.children[parent, token] = len(self.tokens)
            self.tokens.append(token)
            self.parents.append(parent)
            self.depths.append(1 if parent < 0 else self.depths[parent] + 1)
            self.chance.append(chance)
            self.reach.append(reach)
            self.kinds.append(kind)
        elif chance > self.chance[node]:
            self.chance[node], self.reach[node] = chance, reach
        return node

    def add_guess(
        self, guess: Guess, calibration: Calibration, trust: float, depth: int, below: int = -1
    ) -> None:
        """Merge a look-up's chain below a node, at most `depth` tokens of it."""
        at, kind, probs = below, guess.kind, guess.probs
        for level, token in enumerate(guess.tokens[:depth], start=1):
            chance = calibration.rate(kind, level, probs[level - 1]) * trust
            chance = LIKELY if chance > LIKELY else chance
            at = self.put(at, token, chance, kind)
            if self.reach[at] < self.floor:
                break

    def add_certain(self, tokens: Sequence[int], kind: str) -> int:
        """Merge a chain that can't be wrong; its last node, -1 if it is empty."""
        at = -1
        for token in tokens:
            at = self.put(at, token, 1.0, kind)
        return at

    def add_tree(
        self,
        tokens: Sequence[int],
        parents: Sequence[int],
        scores: Sequence[float],
        name: str,
        calibration: Calibration,
        trust: float,
        depth: int,
    ) -> None:
        """Merge a device drafter's tree; scores are log-probabilities of whole paths."""
        where: list[int] = []
        for token, parent, score in zip(tokens, parents, scores, strict=True):
            above = scores[parent] if parent >= 0 else 0.0
            estimate = min(exp(min(score - above, 0.0)), LIKELY)
            kind = tree_kind(name, score - above)
            at = where[parent] if parent >= 0 else -1
            level = 1 if at < 0 else self.depths[at] + 1
            if level > depth or (parent >= 0 and at < 0):
                where.append(-1)
                continue
            chance = min(calibration.rate(kind, level, estimate) * trust, LIKELY)
            where.append(self.put(at, token, chance, kind))

    def settle(self) -> None:
        """Make reach agree with chance once everything is merged (a parent may have risen)."""
        reach = self.reach
        for i, parent in enumerate(self.parents):
            reach[i] = self.chance[i] * (reach[parent] if parent >= 0 else 1.0)

    def order(self) -> list[int]:
        """Nodes by falling reach; parents before their children."""
        return sorted(range(len(self.reach)), key=lambda i: -self.reach[i])

    def tree(self, given: Sequence[int], keep: Sequence[int]) -> tuple[TokenTree, list[int]]:
        """The given chain with the nodes `keep` (closed under parents) below its last node.

        Returns the tree and, per guess of it, the candidate it came from.
        """
        top = len(given) - 1
        chosen = sorted(keep)
        if chosen == list(range(len(chosen))) and all(
            parent == i - 1 for i, parent in enumerate(self.parents[: len(chosen)])
        ):
            count = top + 1 + len(chosen)
            tokens = [*given, *self.tokens[: len(chosen)]]
            return TokenTree(tokens, range(-1, count - 1), top + 1), chosen
        place: dict[int, int] = {-1: top}
        tokens = list(given)
        parents = list(range(-1, top))
        for i in chosen:
            place[i] = len(tokens)
            tokens.append(self.tokens[i])
            parents.append(place[self.parents[i]])
        return TokenTree(tokens, parents, top + 1), chosen


def tree_kind(name: str, score: float) -> str:
    """What a node of a device drafter's tree is calibrated by: tenths of its own probability."""
    return f"{name}:{int(min(exp(min(score, 0.0)), LIKELY) * 10)}"


def is_ordered(reach: Sequence[float]) -> bool:
    """True if probabilities fall along the sequence (a single chain: no sorting needed)."""
    return all(a >= b for a, b in pairwise(reach))
