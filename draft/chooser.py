"""How large a device drafter grows its trees, and when it had better not run.

What shape: by a model, calibrated acceptance per depth against measured costs of drafting and
verifying. Whether at all: by what happened, tokens per time of steps with its guesses against steps
without them (which may have look-ups), each tried now and then while the other is in force. Knows
numbers only: no rows, no tensors, no models.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from spec_serve.draft.base import Plan
from spec_serve.draft.budget import GAIN, Calibration
from spec_serve.draft.cost import CostCurve

NOTHING = Plan(0, 0, 0)


@dataclass(slots=True)
class Average:
    """A mean that counts every value alike at first and forgets slowly later."""

    value: float
    count: int = 0

    LEAST = 0.01

    def add(self, value: float) -> None:
        """One more value."""
        self.count += 1
        self.value += max(1.0 / self.count, self.LEAST) * (value - self.value)


@dataclass(slots=True)
class Chooser:
    """Decides for one device drafter named `name`.

    target, draft: their cost curves. sunk: the drafter sees every token whether it grows a tree or
    not (it reads taps). Rechecks every `PERIOD` steps; the way that is not in force is tried for
    `PROBE` steps, with growing pauses up to `REPROBE` steps.
    """

    target: CostCurve
    draft: CostCurve | None
    calibration: Calibration
    name: str
    max_nodes: int
    sunk: bool = False
    fixed: Plan | None = None  # always grow this (tests, acceptance measurements)
    _best: Plan = NOTHING
    _pays: bool = False
    _step: int = 0
    _next: int = 0  # step of the next check
    _probe: int = 24  # step of the next try of the other way
    _pause: int = 50  # steps from it to the one after
    _with: Average = field(default_factory=lambda: Average(1.0))
    _without: Average = field(default_factory=lambda: Average(1.0))
    _took: dict[tuple[int, int], Average] = field(default_factory=dict)
    _pace: Average = field(default_factory=lambda: Average(1.0))

    PERIOD = 16
    REPROBE = 400
    PROBE = 8
    FIRST = 24  # steps for which it is tried at the beginning, and after which its gain is believed
    GUESS = 0.7  # acceptance believed before anything is known
    SHAPES = (*((d, 1) for d in (1, 2, 3, 4, 5, 6, 8)), (2, 2), (3, 2), (4, 3), (5, 4))

    def plan(self, rows: int) -> Plan:
        """The plan for this step, with `rows` rows to draft for."""
        if self.fixed is not None:
            return self.fixed
        if self.draft is None or self.max_nodes == 0:
            return NOTHING
        self._step += 1
        if self._step >= self._next:
            self._next = self._step + self.PERIOD
            self._decide(rows)
        if self._step >= self._probe + self.PROBE:
            self._probe = self._step + self._pause
            self._pause = min(2 * self._pause, self.REPROBE)
        trying = self._step >= self._probe
        grows = self._pays != trying or self._step <= self.FIRST
        return self._best if grows else NOTHING

    def full(self) -> Plan:
        """The largest sensible tree (mode max)."""
        if self.fixed is not None:
            return self.fixed
        return Plan(min(8, self.max_nodes), min(4, self.max_nodes), self.max_nodes)

    def took(self, plan: Plan, rows: int, ms: float) -> None:
        """Growing by `plan` for so many rows took ms."""
        expected = self._modelled(plan.depth, plan.width, rows)
        ratio = min(max(ms / expected, 0.1), 10.0)
        self._pace.add(ratio)
        shape = plan.depth, plan.width
        self._took.setdefault(shape, Average(ratio)).add(ratio)

    def gained(self, drafted: bool, gain: float) -> None:
        """A decoding step, with guesses of the drafter on offer or without, was `gain` times as
        quick per token as plain decoding, time for drafting included."""
        (self._with if drafted else self._without).add(gain)

    def cost(self, depth: int, width: int, rows: int) -> float:
        """Milliseconds of growing a tree of this shape for each of `rows` rows."""
        known = self._took.get((depth, width), self._pace)
        return self._modelled(depth, width, rows) * known.value

    def _modelled(self, depth: int, width: int, rows: int) -> float:
        assert self.draft is not None
        return self.draft.at(2 * rows) + (depth - 1) * self.draft.at(width * rows)

    def _decide(self, rows: int) -> None:
        """The best shape by the model; whether it pays by the model, later by what happened."""
        assert self.draft is not None
        seen = self.draft.at(2 * rows) * self._pace.value if self.sunk else 0.0
        plain = rows / (self.target.at(rows, rows=rows) + seen)
        best_gain = 0.0
        for depth, width in self.SHAPES:
            nodes = depth * width
            if nodes > self.max_nodes:
                continue
            reach, tokens, rate = 1.0, 1.0, self.GUESS
            for level in range(1, depth + 1):
                # Of a level that was never grown, what the one above it says is believed.
                rate = self.calibration.rate(self.name, level, rate)
                reach *= min(1.0, rate * (1.0 + 0.12 * (width - 1)))
                tokens += reach
            ms = self.cost(depth, width, rows) + self.target.at(rows * (1 + nodes), rows=rows)
            gain = rows * tokens / ms / plain
            if gain > best_gain:
                self._best, best_gain = Plan(depth, width, nodes), gain
        if self._with.count < self.FIRST:
            self._pays = best_gain > GAIN
        else:
            # What is in force stays so unless the other way is better by more than noise.
            edge = 1.0 if self._pays else GAIN
            self._pays = self._with.value > edge * self._without.value
