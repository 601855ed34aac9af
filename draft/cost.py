"""What a forward costs: milliseconds by nodes and context, measured at start and followed live.

Decisions rest on ratios (eight nodes against one), so timings must not bend them: when another
program slows the machine, all sizes become dearer together. A Kalman filter in logarithms keeps
the two apart: the machine's speed moves quickly; the errors of the sizes' measurements, a random
walk over the logarithm of the size, are learnt slowly, and neighbours learn from each other. Knows
numbers only.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from math import exp, log, log2, sqrt

_LEAST = 1e-3  # ms: a clock that stood still is no step for nothing
_JITTER = 0.15**2  # variance of the logarithm of one timing
_DRIFT = 0.03**2  # of the machine's speed from one timing to the next
_START = 0.2**2  # of its speed at first
_DOUBT = 0.25**2  # of a size's measured cost against that of half as many nodes
_CONTEXT = 0.5**2  # of the measured cost of context
_RECALL = 0.02  # share of the errors that is forgotten every `_EVERY` timings, as doubt returns
_EVERY = 64
_CLIP = 2.0  # standard deviations one timing counts as at most


class CostCurve:
    """Milliseconds of one forward over n nodes that look back on some context.

    points: (n, ms) pairs at no context, n ascending; between them the cost is interpolated, beyond
    the last one extrapolated in proportion. per_row, per_node: milliseconds that every cached token
    a row stands on costs once, and once more for each of its nodes.
    """

    def __init__(
        self,
        points: Sequence[tuple[int, float]],
        per_row: float = 0.0,
        per_node: float = 0.0,
    ) -> None:
        assert points and all(a[0] < b[0] for a, b in zip(points, points[1:], strict=False))
        self._sizes = [n for n, _ in points]
        self._ms = [max(ms, _LEAST) for _, ms in points]
        self.per_row, self.per_node = per_row, per_node
        # The logarithms of the machine's slowness now, of each size's error and of the context's,
        # and what is not known of them. The smallest size is the measure of the speed: it has no
        # error of its own.
        self._state = [0.0] * (len(points) + 2)
        walk = [0.0, *(log2(n / points[0][0]) for n, _ in points), 0.0]
        self._prior = [[_DOUBT * min(a, b) for b in walk] for a in walk]
        self._prior[-1][-1] = _CONTEXT
        self._doubt = [list(line) for line in self._prior]
        self._doubt[0][0] = _START
        self._pace = self._far = 1.0
        self._seen = 0
        self._table: list[float] = []
        self._places: list[tuple[int, float]] = []  # per n: the point below, share of the next
        for n in range(1, self._sizes[-1] + 1):
            low = max(bisect_right(self._sizes, n) - 1, 0)
            below, above = self._sizes[low], self._sizes[min(low + 1, len(points) - 1)]
            self._places.append((low, max(n - below, 0) / max(above - below, 1)))
        self._rebuild()

    def _rebuild(self) -> None:
        """The cost of each n at the measured speed; more nodes never cost less."""
        ms = [ms * exp(error) for ms, error in zip(self._ms, self._state[1:-1], strict=True)]
        ms = [*accumulate(ms, max)]
        steps = [*(b - a for a, b in pairwise(ms)), 0.0]
        self._table = [0.0, *(ms[low] + share * steps[low] for low, share in self._places)]
        added = [
            (b - ms[0]) / (n - self._sizes[0]) for n, b in zip(self._sizes[1:], ms[1:], strict=True)
        ]
        # Half of the least that a node adds on average: no node likelier than that is cut off.
        self.floor = 0.5 * min(added, default=0.0) / ms[0]

    def at(self, n: int, context: float = 0.0, rows: int = 1) -> float:
        """Milliseconds for n nodes of `rows` rows with `context` cached tokens each; 0 for none."""
        if n < 1:
            return 0.0
        table = self._table
        ms = table[n] if n < len(table) else table[-1] * n / (len(table) - 1)
        far = context * (self.per_row * rows + self.per_node * n) * self._far
        return (ms + far) * self._pace

    def observe(self, n: int, ms: float, context: float = 0.0, rows: int = 1) -> None:
        """A live forward took ms."""
        if n < 1 or n > self._sizes[-1] or ms <= 0:
            return
        low, share = self._places[n - 1]
        state, doubt = self._state, self._doubt
        doubt[0][0] += _DRIFT
        # What the timing measures: the speed, the errors of the sizes it lies between, and the
        # context's, as far as they weigh in it.
        expected = self.at(n, context, rows)
        near = self.at(n) / expected
        i, j, far = low + 1, low + 1 + (share > 0), 1.0 - near
        parts = ((0, 1.0), (i, near * (1.0 - share)), (j, near * share), (-1, far))
        seen = [sum(weight * line[k] for k, weight in parts) for line in doubt]
        variance = sum(weight * seen[k] for k, weight in parts) + _JITTER
        most = _CLIP * sqrt(variance)
        off = min(max(log(ms / expected), -most), most)
        for k, known in enumerate(seen):
            if known:
                gain = known / variance
                state[k] += gain * off
                doubt[k] = [d - gain * s for d, s in zip(doubt[k], seen, strict=True)]
        self._pace, self._far = exp(state[0]), exp(state[-1])
        self._seen += 1
        if self._seen % _EVERY == 0:
            self._forget()
        if low or share or self._seen % _EVERY == 0:
            self._rebuild()

    def _forget(self) -> None:
        """Machines change: go a little of the way back to what was measured at start."""
        for k in range(1, len(self._state)):
            self._state[k] *= 1.0 - _RECALL
            self._doubt[0][k] *= 1.0 - _RECALL  # as its mirror below: the speed forgets nothing
            self._doubt[k] = [
                known + _RECALL * (prior - known)
                for known, prior in zip(self._doubt[k], self._prior[k], strict=True)
            ]
