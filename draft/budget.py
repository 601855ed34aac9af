"""How many guesses a step should verify: measured cost against calibrated acceptance.

Source: the cost model of DSpark and vLLM's adaptive verification, generalised from prefixes to
trees (maximise expected tokens per second; a child is never likelier than its parent, so the best m
nodes are always closed under parents). Knows numbers only: no rows, no tensors, no models.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_serve.draft.cost import CostCurve

GAIN = 1.05  # a tree must promise this much over plain decoding before it is worth the risk


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
    reach: Sequence[float],
    emitting: int,
    given: int,
    cost: CostCurve,
    context: float = 0.0,
) -> int:
    """How many of the candidate nodes to verify.

    reach: probability that each candidate lies on the accepted path, descending, over all rows.
    emitting: rows that emit a token anyway. given: nodes that run in any case. context: cached
    tokens a row stands on, on average. Returns m maximising (emitting + sum reach[:m]) / time; 0
    unless the gain over m = 0 is at least GAIN.
    """
    base = emitting / cost.at(given, context, emitting)
    best, best_rate = 0, base * GAIN
    tokens = float(emitting)
    for m, share in enumerate(reach, start=1):
        tokens += share
        rate = tokens / cost.at(given + m, context, emitting)
        if rate > best_rate:
            best, best_rate = m, rate
    return best


class Purse:
    """What one row may lose by guessing, in plain steps: nobody bets more than he has.

    A tree's bet is what it costs beyond plain decoding; accepted guesses are won. Where less than
    the first stake is left, every token earns a little, so that a row that only ever loses loses
    `EARNED` a token and its stake at most, and tries again from time to time, the more seldom the
    more a try costs.
    """

    __slots__ = ("held",)

    EARNED = 0.02
    STAKE = 1.0
    MOST = 12.0

    def __init__(self, held: float = STAKE) -> None:
        self.held = held

    def nodes(self, most: int, given: int, cost: CostCurve, context: float, rows: int) -> int:
        """The most guesses, up to `most`, that the row can pay if it is wrong about all of them."""
        plain = cost.at(given, context, rows)
        limit = plain * (1.0 + self.held / rows)
        if cost.at(given + most, context, rows) <= limit:
            return most
        low, high = 0, most  # low can be paid, high can't
        while high - low > 1:
            middle = (low + high) // 2
            if cost.at(given + middle, context, rows) <= limit:
                low = middle
            else:
                high = middle
        return low

    def settle(self, tokens: int, won: float, bet: float) -> None:
        """A step of the row gave `tokens` tokens; `won` guesses were right, for a bet of `bet`."""
        self.held = min(self.held + won - bet, self.MOST)
        self.earn(tokens)

    def earn(self, tokens: int = 1) -> None:
        """So many tokens came."""
        if self.held < self.STAKE:
            self.held = min(self.held + tokens * self.EARNED, self.STAKE)
