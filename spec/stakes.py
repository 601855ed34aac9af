"""Which guesses a step verifies: the node budget shared out to rows, and what they won or lost.

Rows bet plain steps out of a purse each (draft/budget.py); after a step its measured time settles
the bets. Look-ups that are asked in vain rest a little, where asking takes a share of a step that
shows. Knows rows and costs; nothing of slots or of how guesses come about.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from time import process_time

from spec_serve.draft.budget import best_count
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.mix import Candidates, is_ordered
from spec_serve.spec.row import Grown, Row
from spec_serve.spec.step import Job, Result

CROWD = 4  # rows beyond which look-ups that were of no use are not asked again at once
REST = 8  # steps they rest
ASKING = 0.005  # share of a step that asking look-ups in vain may take
SELDOM = 4  # plain steps of which one is timed
SURPRISE = 2.0  # how far from what was expected a step's time counts against a row


@dataclass(slots=True)
class Part:
    """One row's plan for the step: given nodes, whether they end its tokens, kept candidates.

    grown: the device drafter's tree among the candidates.
    """

    row: Row
    given: int
    final: bool
    candidates: Candidates | None
    keep: list[int]
    grown: Grown | None = None


class Stakes:
    """Shares out guesses. most: nodes per row and step at most. computes: steps run on this
    process's own threads and not on another device."""

    def __init__(self, cost: CostCurve, most: int, computes: bool = False) -> None:
        self.cost = cost
        self._computes = computes
        self._most = most
        self._busy = process_time()
        self._plain = 0
        self.bounded = True  # rows bet no more than they have
        self._asking_ms = 0.0  # what asking one row's look-ups takes, lately

    def least(self, rows: int, context: float) -> float:
        """What the smallest tree costs, in plain steps of one row; nothing where no row runs."""
        if not rows:
            return 0.0
        plain = self.cost.at(rows, context, rows)
        return rows * (self.cost.at(rows + 1, context, rows) / plain - 1.0)

    def asked(self, ms: float) -> None:
        """Asking a row's look-ups took so long."""
        before = self._asking_ms or ms
        self._asking_ms = before + 0.05 * (min(ms, 2 * before) - before)

    def useless(self, row: Row, rows: int) -> None:
        """A row's look-ups were asked, and nothing is verified: let them rest, if asking shows."""
        row.idle += 1
        if rows > CROWD:
            row.rest = REST
            return
        worth = self._asking_ms / (ASKING * self.cost.at(1, len(row.tokens)))
        row.rest = min(row.idle // 4, int(worth), REST // 2)

    def share_out(self, parts: list[Part], emitting: int, given: int, context: float) -> None:
        """Give the step's node budget to the candidates most likely to be accepted.

        emitting: rows that emit a token; given: nodes that run in any case; context: cached tokens
        that a row stands on, on average.
        """
        cost = self.cost
        if len(parts) == 1:
            part = parts[0]
            candidates = part.candidates
            assert candidates is not None
            reach = candidates.reach
            if is_ordered(reach):
                order: Sequence[int] = range(len(reach))
            else:
                order = candidates.order()
                reach = [reach[i] for i in order]
            limit = self._limit(part, emitting, given, context)
            best = best_count(reach[:limit], emitting, given, cost, context)
            part.keep = list(order[:best])
            return
        pool: list[tuple[float, int, int]] = []
        for p, part in enumerate(parts):
            candidates = part.candidates
            assert candidates is not None
            order = candidates.order()[: self._limit(part, emitting, given, context)]
            pool += [(-candidates.reach[i], p, i) for i in order]
        pool.sort()
        best = best_count([-entry[0] for entry in pool], emitting, given, cost, context)
        for _, p, i in pool[:best]:
            parts[p].keep.append(i)

    def _limit(self, part: Part, emitting: int, given: int, context: float) -> int:
        """The most nodes a row may have: what was asked for, and what it can pay if all fail."""
        asked = part.row.request.speculation.max_nodes
        most = self._most if asked is None else min(self._most, asked)
        if not self.bounded:
            return most
        assert part.candidates is not None
        certain = sum(reach >= 1.0 for reach in part.candidates.reach)
        paid = part.row.purse.nodes(most, given, self.cost, context, emitting)
        return min(most, certain + paid)

    def begin(self) -> None:
        """A step's job is built."""
        self._busy = process_time()

    def settle(self, job: Job, parts: Sequence[Part], result: Result) -> float:
        """A decoding step is over: correct the costs, and pay the rows of the job what they won.

        Returns how many times as quick as plain decoding the step's tokens were.
        """
        nodes = cached = 0
        for twig in job.twigs:
            nodes += len(twig.tree.tokens)
            cached += twig.prefix
        count = len(job.twigs)
        context = cached / count
        ms = result.verify_us / 1e3
        if self._computes:
            # Of a step that took longer than all threads computed, others had the processor.
            ms = min(ms, (process_time() - self._busy) * 1e3)
        draft_ms = result.draft_us / 1e3 if job.plan.nodes and job.drafting else 0.0
        plain = self.cost.at(count, context, count)
        if nodes == count and not draft_ms:  # the common case: quick, nothing was bet
            self._plain += 1
            if self._plain % SELDOM == 0 and not any(twig.forced for twig in job.twigs):
                self.cost.observe(nodes, ms, context, count)
            for part in parts:
                part.row.purse.earn()
            ms += result.draft_us / 1e3  # what a drafter that reads the target takes in any case
            return plain / ms if ms > 0 else 1.0
        expected = self.cost.at(nodes, context, count)
        if not any(twig.forced for twig in job.twigs):  # cheaper: the head was left out for some
            self.cost.observe(nodes, ms, context, count)
        ms = min(max(ms, expected / SURPRISE), expected * SURPRISE)
        each = count * max(ms / plain - 1.0, 0.0) / max(nodes - count, 1)
        share = count * draft_ms / plain / max(len(job.drafting), 1)
        drafting = {row.b for row in job.drafting} if draft_ms else set()
        right = 0
        for b, (part, twig, path) in enumerate(zip(parts, job.twigs, result.paths, strict=True)):
            bet = each * (len(twig.tree.tokens) - 1) + (share if b in drafting else 0.0)
            right += len(path)
            if self.bounded:
                part.row.purse.settle(1 + len(path), len(path), bet)
        return (1.0 + right / count) * plain / (ms + result.draft_us / 1e3)


def mean_context(picked: Sequence[tuple[Row, int]]) -> float:
    """Cached tokens that a row of the step stands on, on average."""
    return sum(row.prefix for row, _ in picked) / max(len(picked), 1)
