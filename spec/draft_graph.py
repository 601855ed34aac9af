"""Drafting as a graph: from a verdict to the next trees, for rows that were shown all else before.

What the drafter sees of such a row is the accepted guesses and the token behind them, so its chain
has one length per shape, and which tokens lie in it is found on the device. Rows beyond those that
draft are padding: one token at position 0 whose K/V go to TRASH. Rows with more to be caught up
draft without a graph (spec/seen.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig
from spec_serve.cache.pool import TRASH
from spec_serve.draft.base import Drafter, Plan, Seen, Trees
from spec_serve.kernels.graphs import Capture
from spec_serve.spec.frames import Block, Frame
from spec_serve.spec.sampling import RowNoise
from spec_serve.spec.seen import DraftRow


@dataclass(frozen=True, slots=True)
class Shape:
    """width: tokens of a chain, the newest included. plan: how trees are grown."""

    width: int
    plan: Plan


def packed(trees: Trees) -> Tensor:
    """[B, 1 + 3 G] int64: how many nodes, their tokens, parents, and the bits of their scores."""
    scores = trees.score.float().contiguous().view(torch.int32).to(torch.int64)
    return torch.cat((trees.count.unsqueeze(1), trees.tokens, trees.parents, scores), 1)


def width_for(depth: int, most: int) -> int:
    """Tokens of a chain behind trees this deep: few sizes, as each is a graph."""
    width = 2
    while width < depth + 1:
        width *= 2
    return min(width, most + 1)


class DraftGraph:
    """The graph of one frame and shape. taps: where the target's features of the frame's nodes are.

    Recorded over padding alone; the frame has to be idle.
    """

    def __init__(
        self, frame: Frame, shape: Shape, scratch: int, drafter: Drafter, taps: Tensor | None,
        capture: Capture,
    ) -> None:  # fmt: skip
        rows = frame.rows
        device = frame.told.device
        self._frame, self._shape, self._drafter, self._taps = frame, shape, drafter, taps
        self._scratch = scratch
        names = ("rows", "start", "ends", "seeds", "temperature")
        self._block = block = Block(dict.fromkeys(names, rows) | {"grants": rows * scratch}, device)
        block.host["rows"][:] = rows  # the frame's row of padding
        block.host["grants"][:] = TRASH
        block.keep()
        block.send()
        self._grants = block.at["grants"].view(rows, scratch)
        temperature = block.at["temperature"].view(torch.float64)
        self._noise = RowNoise.over(block.at["seeds"], temperature)
        self._trees = torch.zeros_like(packed(self._propose()))
        self._replay = capture.record(self._work)

    def run(self, rows: Sequence[DraftRow], twigs: Sequence[Twig]) -> Tensor:
        """Trees of these rows, packed, behind the verdict in the frame."""
        block, count = self._block, len(rows)
        block.reset()
        host = block.host
        ptr = 0
        first: list[int] = []
        for twig in twigs:
            first.append(ptr)
            ptr += len(twig.slots)
        host["rows"][:count] = [row.b for row in rows]
        host["start"][:count] = [row.start for row in rows]
        host["ends"][:count] = [first[row.b] + twigs[row.b].tree.given - 1 for row in rows]
        host["seeds"][:count] = [row.state.seed for row in rows]
        warm = host["temperature"].view("float64")
        warm[:count] = [row.state.temperature for row in rows]
        grants = host["grants"].reshape(-1, self._scratch) if self._scratch else None
        if grants is not None:
            grants[:count] = [list(row.grants) for row in rows]
        block.send()
        self._replay()
        return self._trees[:count]

    def _work(self) -> None:
        self._trees.copy_(packed(self._propose()))

    def _propose(self) -> Trees:
        made = self._drafter.propose(self._seen(), self._grants, self._shape.plan, self._noise)
        assert made is not None, "a plan with nodes yields trees"
        return made

    def _seen(self) -> Seen:
        """Chains of accepted guesses and the token behind them, padding at their ends."""
        frame, at, width = self._frame, self._block.at, self._shape.width
        batch, rows, start = frame.whole.batch, at["rows"], at["start"]
        count, device = frame.rows, rows.device
        real = rows < count
        told = frame.told.index_select(0, rows)  # [R, 3 + D]
        bonus, accepted, leaf = (torch.where(real, told[:, i], 0) for i in range(3))
        path = torch.where(real[:, None], told[:, 3 : 2 + width], -1)  # [R, width - 1]
        safe = path.clamp_min(0)
        none = torch.zeros((count, 1), dtype=torch.int64, device=device)
        column = accepted.unsqueeze(1)
        tokens = torch.cat((torch.where(path < 0, 0, batch.tokens[safe]), none), 1)
        tokens = tokens.scatter(1, column, bonus.unsqueeze(1)).view(-1)  # [R * width]
        slots = torch.cat((torch.where(path < 0, TRASH, batch.slots[safe]), none + TRASH), 1)
        slots = slots.scatter(1, column, frame.next_slots[rows].unsqueeze(1)).view(-1)
        along = torch.arange(width, device=device)
        nodes = torch.arange(count * width, device=device)
        row = torch.arange(count, device=device)
        last = row * width + accepted
        ptr = torch.arange(count + 1, device=device) * width
        chain = TreeBatch(
            tokens=tokens,
            positions=(start.unsqueeze(1) + along).view(-1),
            parents=torch.where(along > 0, nodes.view(count, width) - 1, -1).view(-1),
            slots=slots,
            row_of=row.repeat_interleave(width),
            ancestors=torch.zeros((count * width, 1), dtype=torch.int64, device=device),
            given=torch.ones_like(nodes),
            logit_of=torch.full_like(nodes, -1),
            logits_at=last,
            node_ptr=ptr,
            twig_ptr=ptr,
            twig_slots=slots,
            row_ids=batch.row_ids[rows],
            prefix=start,
            chain=torch.ones_like(row),
        )
        length = torch.where(real, batch.positions[leaf] + 2, 1)
        features = None
        if self._taps is not None:
            before = torch.cat((at["ends"].unsqueeze(1), safe), 1).view(-1)
            features = self._taps.index_select(0, before)
        return Seen(chain, last, length, features, False)
