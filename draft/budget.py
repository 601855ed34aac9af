"""How many guesses a step should verify: measured cost against calibrated acceptance.

Source: the cost model of DSpark and vLLM's adaptive verification, generalised from prefixes to
trees (maximise expected tokens per second; a child is never likelier than its parent, so the best m
nodes are always closed under parents). Knows numbers only: no rows, no tensors, no models.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass

from spec_serve.draft.base import Plan

GAIN = 1.04  # a tree must promise this much over plain decoding before it is worth the risk


class CostCurve:
    """Milliseconds of one forward over n nodes, measured at start and corrected while running.

    points: (n, ms) pairs, n ascending; between them the cost is interpolated, beyond the last one
    extrapolated in proportion.
    """

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        assert points and all(a[0] < b[0] for a, b in zip(points, points[1:], strict=False))
        self._sizes = [n for n, _ in points]
        self._ms = [ms for _, ms in points]
        self._table: list[float] = []
        self._seen = 0
        self._rebuild()

    def _rebuild(self) -> None:
        table = [0.0]
        sizes, ms = self._sizes, self._ms
        for n in range(1, sizes[-1] + 1):
            i = bisect_left(sizes, n)
            if i == 0 or sizes[i] == n:
                table.append(ms[i])
            else:
                share = (n - sizes[i - 1]) / (sizes[i] - sizes[i - 1])
                table.append(ms[i - 1] + share * (ms[i] - ms[i - 1]))
        self._table = table

    def at(self, n: int) -> float:
        """Milliseconds for n nodes; 0 for none."""
        table = self._table
        return table[n] if n < len(table) else table[-1] * n / (len(table) - 1)

    def observe(self, n: int, ms: float) -> None:
        """A live forward over n nodes took ms.

        Follows the low end of what is seen: other work on the machine only ever makes a step
        slower, and a size that happened to meet it must not look dear for long. One timing counts
        as a factor of two at most.
        """
        if n < 1 or n > self._sizes[-1] or ms <= 0:
            return
        ratio = min(max(ms / self.at(n), 0.5), 2.0) - 1.0
        weight = 0.2 if ratio < 0 else 0.04
        nearest = min(range(len(self._sizes)), key=lambda i: abs(self._sizes[i] - n))
        for i in range(len(self._ms)):
            self._ms[i] *= 1.0 + ratio * (weight if i == nearest else weight / 4)
        self._seen += 1
        if self._seen % 16 == 0:
            self._rebuild()

    def rescale(self, ratio: float) -> None:
        """All sizes cost `ratio` times what was believed; moves a twentieth of the way."""
        step = 1.0 + (min(max(ratio, 0.5), 2.0) - 1.0) * 0.05
        self._ms = [ms * step for ms in self._ms]
        self._table = [ms * step for ms in self._table]


class Calibration:
    """What share of a kind's guesses proves right, per depth, given that the parent was right.

    A cell starts at the source's own estimate with the weight of `PRIOR` observations and forgets
    slowly, so that it follows the traffic.
    """

    PRIOR = 8.0
    KEEP = 400.0
    DEEPEST = 12

    def __init__(self) -> None:
        self._cells: dict[tuple[str, int], list[float]] = {}

    def rate(self, kind: str, depth: int, estimate: float) -> float:
        """Probability in (0, 1); depth 1 = a child of the newest token."""
        cell = self._cells.get((kind, min(depth, self.DEEPEST)))
        if cell is None:
            return estimate
        return (cell[0] + self.PRIOR * estimate) / (cell[1] + self.PRIOR)

    def observe(self, kind: str, depth: int, hit: bool) -> None:
        """One guess whose parent was right proved right or wrong."""
        key = (kind, min(depth, self.DEEPEST))
        cell = self._cells.get(key)
        if cell is None:
            cell = self._cells[key] = [0.0, 0.0]
        cell[0] += hit
        cell[1] += 1.0
        if cell[1] > self.KEEP:
            cell[0] *= 0.5
            cell[1] *= 0.5

    def table(self) -> dict[str, dict[int, tuple[float, float]]]:
        """kind -> depth -> (right, tried), for statistics."""
        table: dict[str, dict[int, tuple[float, float]]] = {}
        for (kind, depth), (hits, tries) in sorted(self._cells.items()):
            table.setdefault(kind, {})[depth] = (hits, tries)
        return table


def best_count(
    reach: Sequence[float], emitting: int, given: int, cost: CostCurve, overhead_ms: float = 0.0
) -> int:
    """How many of the candidate nodes to verify.

    reach: probability that each candidate lies on the accepted path, descending, over all rows.
    emitting: rows that emit a token anyway. given: nodes that run in any case. overhead_ms: what a
    step costs beside the forward. Returns m maximising (emitting + sum reach[:m]) / time; 0 unless
    the gain over m = 0 is at least GAIN.
    """
    base = emitting / (overhead_ms + cost.at(given))
    best, best_rate = 0, base * GAIN
    tokens = float(emitting)
    for m, share in enumerate(reach, start=1):
        tokens += share
        rate = tokens / (overhead_ms + cost.at(given + m))
        if rate > best_rate:
            best, best_rate = m, rate
    return best


@dataclass(slots=True)
class Chooser:
    """Decides how large a device drafter may grow, and when it is not worth running at all.

    target, draft: their cost curves. Rechecks every `PERIOD` steps; a drafter that does not pay is
    tried again for a few steps every `REPROBE` steps.
    """

    target: CostCurve
    draft: CostCurve | None
    calibration: Calibration
    name: str
    max_nodes: int
    _plan: Plan = Plan(0, 0, 0)
    _step: int = 0
    _until: int = 0
    _probe_until: int = 24
    fixed: Plan | None = None  # always grow this (tests, acceptance measurements)

    PERIOD = 16
    REPROBE = 400
    PROBE = 6
    SHAPES = (*((d, 1) for d in (1, 2, 3, 4, 5, 6, 8)), (2, 2), (3, 2), (4, 3), (5, 4))

    def plan(self, rows: int) -> Plan:
        """The plan for this step, with `rows` rows to draft for."""
        if self.fixed is not None:
            return self.fixed
        if self.draft is None or self.max_nodes == 0:
            return Plan(0, 0, 0)
        self._step += 1
        if self._step >= self._until:
            self._until = self._step + self.PERIOD
            self._plan = self._decide(rows)
            if self._plan.nodes == 0 and self._step >= self._probe_until + self.REPROBE:
                self._probe_until = self._step + self.PROBE
                self._until = self._probe_until
        if self._step <= self._probe_until and self._plan.nodes == 0:
            return Plan(min(3, self.max_nodes), 1, min(3, self.max_nodes))
        return self._plan

    def full(self) -> Plan:
        """The largest sensible tree (mode max)."""
        if self.fixed is not None:
            return self.fixed
        return Plan(min(8, self.max_nodes), min(4, self.max_nodes), self.max_nodes)

    def _decide(self, rows: int) -> Plan:
        assert self.draft is not None
        best, best_rate = Plan(0, 0, 0), rows / self.target.at(rows) * GAIN
        for depth, width in self.SHAPES:
            nodes = depth * width
            if nodes > self.max_nodes:
                continue
            reach, tokens = 1.0, 1.0
            for level in range(1, depth + 1):
                rate = self.calibration.rate(self.name, level, 0.7)
                reach *= min(1.0, rate * (1.0 + 0.12 * (width - 1)))
                tokens += reach
            ms = self.draft.at(2 * rows) + (depth - 1) * self.draft.at(width * rows)
            speed = rows * tokens / (ms + self.target.at(rows * (1 + nodes)))
            if speed > best_rate:
                best, best_rate = Plan(depth, width, nodes), speed
        return best
