"""Steps as graphs: the forward, what follows it, and drafting, each recorded once per size.

A step that fits a tier is a chain of up to three graphs: forward, verdict (draw, walk, settle),
draft. A step whose choices depend on more than temperature and seed (filters, penalties, masks)
replays the forward and runs the rest as ever, on the same tensors without padding: its launches are
queued while the forward runs. Draft graphs are recorded when a shape is asked for a second time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_serve.cache.batch import WORD, TreeBatch, Twig
from spec_serve.cache.pool import KVPool, LayerKV
from spec_serve.draft.base import Drafter, Plan, scratch_slots
from spec_serve.kernels.base import AttentionBackend
from spec_serve.kernels.graphs import Capture, Work
from spec_serve.spec.choice import RowSampling
from spec_serve.spec.draft_graph import DraftGraph, Shape, width_for
from spec_serve.spec.frames import Frame, Size, Tier, pick, plainly_drawn, tiers
from spec_serve.spec.operations import StepOperations
from spec_serve.spec.seen import DraftRow
from spec_serve.spec.verify import Verdict
from spec_serve.target.model import Model

log = logging.getLogger("spec_serve.graphs")

DRAFTS = 64
"""Draft graphs kept at most; further shapes run without."""

Progress = Callable[[float], None]


@dataclass(frozen=True, slots=True)
class Parts:
    """What steps are made of."""

    model: Model
    layers: Sequence[LayerKV]
    pool: KVPool
    attention: AttentionBackend
    operations: StepOperations
    drafter: Drafter | None
    vocabulary: int


class Launched:
    """A forward under way. Its results are views that are made when they are asked for: a step that
    is graphs throughout asks for none.

    told: [B, 3 + D] the verdict once there is one: bonus, accepted, leaf, path.
    """

    def __init__(
        self, tier: Tier, frame: Frame, size: Size, logits: Tensor, taps: Tensor | None
    ) -> None:
        self.tier = tier
        self.frame = frame
        self._size = size
        self._logits, self._taps = logits, taps

    @property
    def batch(self) -> TreeBatch:
        """The step's batch without padding."""
        return self.frame.cut(self._size)

    @property
    def logits(self) -> Tensor:
        """[M, V] float32."""
        return self._logits[: self._size.logits]

    @property
    def taps(self) -> Tensor | None:
        """[N, T * H]."""
        return None if self._taps is None else self._taps[: self._size.nodes]

    @property
    def told(self) -> Tensor:
        """[B, 3 + D], see above."""
        return self.frame.told[: self._size.rows]

    def verdict(self, depth: int) -> Verdict:
        """What `told` says, of paths up to `depth` long."""
        told = self.told
        return Verdict(told[:, 3 : 3 + depth], told[:, 1], told[:, 2], told[:, 0])


_Key = tuple[int, Shape]  # rows of the frame


@dataclass(slots=True)
class _Recorded:
    """The graphs of one tier."""

    frame: Frame
    forward: Work
    judge: Work


class StepGraphs:
    """The graphs of one device. Nothing is recorded before `record`."""

    def __init__(self, parts: Parts, capture: Capture, max_rows: int, max_nodes: int) -> None:
        """max_nodes: guesses of a row at most; a path is at most as long."""
        self._parts = parts
        self._capture = capture
        self._depth = max(max_nodes, 1)
        self._words = -(-(max_nodes + 1) // WORD)
        self._tiers = tiers(max_rows, max_nodes)
        self._recorded: dict[Tier, _Recorded] = {}
        self._drafts: dict[_Key, DraftGraph] = {}
        self._asked: Counter[_Key] = Counter()
        self._refused: set[_Key] = set()
        self._wanted: _Key | None = None
        device = parts.pool.device
        forget = parts.pool.table.shape[1] - 1
        largest = {tier.rows: tier.nodes for tier in self._tiers}  # the last one of each
        self._frames = {
            rows: Frame(rows, nodes, self._words, self._depth, forget, device)
            for rows, nodes in largest.items()
        }
        most = max(largest.values())
        self._logits = torch.zeros((most, parts.vocabulary), dtype=torch.float32, device=device)
        self._taps: Tensor | None = None

    @property
    def tiers(self) -> Sequence[Tier]:
        """Of these there are graphs."""
        return tuple(self._recorded)

    @torch.inference_mode()
    def record(self, progress: Progress = lambda share: None, plans: Sequence[Plan] = ()) -> None:
        """Record forward and verdict of every tier, large ones first: their memory serves all; then
        drafting by `plans` for one row, whose trees are as deep as the plan."""
        order = sorted(self._tiers, key=lambda tier: tier.nodes, reverse=True)
        count = len(order) + len(plans)
        for done, tier in enumerate(order):
            progress(done / count)
            self._recorded[tier] = self._record(tier)
        keys = {(1, Shape(width_for(plan.depth, self._depth), plan)) for plan in plans}
        for done, key in enumerate(sorted(keys, key=str), len(order)):
            progress(done / count)
            self._record_draft(key)
        progress(1.0)

    def _record(self, tier: Tier) -> _Recorded:
        parts, table = self._parts, self._parts.pool.table
        frame = self._frames[tier.rows]
        frame.idle(tier.nodes)
        padded = frame.padded(tier.nodes)
        batch, logits = padded.batch, self._logits[: tier.nodes]
        asked = () if parts.drafter is None else parts.drafter.taps

        def forward() -> None:
            plan = parts.attention.plan(batch, table)
            out = parts.model.forward(batch, parts.layers, plan, asked)
            logits.copy_(out.logits[:, : parts.vocabulary])
            if out.taps is not None:
                self._room(out.taps)[: tier.nodes].copy_(out.taps)

        def judge() -> None:
            ops = parts.operations
            chosen = ops.draw(logits, padded.temperature, padded.seeds, padded.drawn)
            verdict = ops.walk(batch, chosen, frame.depth)
            ops.settle(batch, verdict, frame.next_slots, table, padded.replayed)
            _keep(frame, verdict)

        if asked:
            forward()  # makes room for the taps, whose width only the model knows
        return _Recorded(frame, self._capture.record(forward), self._capture.record(judge))

    def _room(self, taps: Tensor) -> Tensor:
        """Where features of taps stay; made with the first, largest tier."""
        if self._taps is None:
            self._taps = torch.zeros_like(taps)
        return self._taps

    # ---- a step

    def forward(
        self, twigs: Sequence[Twig], next_slots: Sequence[int], replays: Sequence[int],
        states: Sequence[RowSampling],
    ) -> Launched | None:  # fmt: skip
        """Start a step's forward; None if it fits no tier."""
        rows, nodes = len(twigs), sum(len(twig.slots) for twig in twigs)
        tier = pick(self._tiers, rows, nodes)
        recorded = None if tier is None else self._recorded.get(tier)
        if tier is None or recorded is None:
            return None
        frame = recorded.frame
        size = frame.fill(tier.nodes, twigs, next_slots, replays, states)
        if size is None:
            return None
        recorded.forward()
        return Launched(tier, frame, size, self._logits, self._taps)

    def judge(self, launched: Launched, states: Sequence[RowSampling], depth: int) -> bool:
        """Find the step's verdict and settle the table; False if its choices depend on too much."""
        frame = launched.frame
        if depth > frame.depth or not plainly_drawn(states):
            return False
        self._recorded[launched.tier].judge()
        return True

    def draft(
        self, launched: Launched, verdict: Verdict | None, rows: Sequence[DraftRow],
        twigs: Sequence[Twig], plan: Plan, depth: int,
    ) -> Tensor | None:  # fmt: skip
        """The drafter's trees by a graph, as `draft_graph.packed` has them; None if there is none
        for this shape yet, or can't be. verdict: None = the one that a graph left."""
        frame = launched.frame
        self._wanted = None
        drafter = self._parts.drafter
        if drafter is None or not plan.nodes or depth > frame.depth:
            return None
        if any(len(row.known) for row in rows):
            return None
        key = frame.rows, Shape(width_for(depth, frame.depth), plan)
        graph = self._drafts.get(key)
        if graph is None:
            self._asked[key] += 1
            room = len(self._drafts) < DRAFTS and key not in self._refused
            if room and self._asked[key] > 1:
                self._wanted = key
            return None
        if verdict is not None:
            _keep(frame, verdict)
        return graph.run(rows, twigs)

    @torch.inference_mode()
    def between(self) -> None:
        """To be called when a step's results were read: records the draft graph it had to do
        without."""
        wanted, self._wanted = self._wanted, None
        if wanted is not None:
            self._record_draft(wanted)

    def _record_draft(self, key: _Key) -> None:
        drafter = self._parts.drafter
        assert drafter is not None
        rows, shape = key
        frame = self._frames[rows]
        frame.idle(1)
        scratch = scratch_slots(drafter, shape.plan)
        try:
            self._drafts[key] = DraftGraph(
                frame, shape, scratch, drafter, self._taps, self._capture
            )
        except RuntimeError:
            log.exception("drafting by %s can't be recorded and runs without a graph", shape.plan)
            self._refused.add(key)


def _keep(frame: Frame, verdict: Verdict) -> None:
    """Leave a verdict where draft graphs look for it."""
    told = frame.told[: verdict.path.shape[0]]
    told[:, 0] = verdict.bonus
    told[:, 1] = verdict.accepted
    told[:, 2] = verdict.leaf
    width = verdict.path.shape[1]
    told[:, 3 : 3 + width] = verdict.path
    if width < frame.depth:
        told[:, 3 + width :].fill_(-1)
