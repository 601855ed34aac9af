"""What a step does behind the forward: draw tokens, walk down the trees, settle the table.

`TorchSteps` runs anywhere and is the specification; spec/fused_steps.py has the same as fused
kernels for NVIDIA GPUs. Which one steps use is decided once, when an engine is put together. Every
operation reads nothing back, so that all of them can be part of a graph. Knows tensors; no jobs.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import TRASH
from spec_serve.kernels.noise import gumbel
from spec_serve.spec.filters import scaled
from spec_serve.spec.nodes import NodeSampling
from spec_serve.spec.sampling import choose
from spec_serve.spec.verify import Verdict, walk
from spec_serve.target.operations import fits_triton


class StepOperations(Protocol):
    """The steps' operations. name: for people."""

    name: str

    def choose(self, logits: Tensor, nodes: NodeSampling | None) -> Tensor:
        """One token per row of logits [M, V], see `spec.sampling.choose`: [M] int64."""
        ...

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """The same for rows without filters, penalties or masks, whatever their temperature.

        logits: [M, V] float32. temperature: [M] float64, 0 = arg-max. seeds and positions (of the
        tokens to be drawn): [M] int64. Returns [M] int64.
        """
        ...

    def walk(self, batch: TreeBatch, chosen: Tensor, depth: int) -> Verdict:
        """See `spec.verify.walk`."""
        ...

    def settle(
        self,
        batch: TreeBatch,
        verdict: Verdict,
        next_slots: Tensor,
        table: Tensor,
        replayed: Tensor | None = None,
    ) -> None:
        """Write what became certain into the table [rows, positions + 1]: the slots of given nodes,
        of the accepted path, and of the token behind it.

        next_slots: [B], TRASH = none was granted. replayed: [N], 1 = the node's entry stays.
        """
        ...


class TorchSteps:
    """The operations in torch."""

    name = "torch"

    def choose(self, logits: Tensor, nodes: NodeSampling | None) -> Tensor:
        """See `StepOperations`."""
        return choose(logits, nodes)

    def draw(self, logits: Tensor, temperature: Tensor, seeds: Tensor, positions: Tensor) -> Tensor:
        """See `StepOperations`."""
        warm = temperature > 0
        noisy = scaled(logits, temperature.where(warm, 1.0))
        noisy = noisy + gumbel(seeds, positions, logits.shape[1])
        return torch.where(warm[:, None], noisy, logits).argmax(-1)

    def walk(self, batch: TreeBatch, chosen: Tensor, depth: int) -> Verdict:
        """See `StepOperations`."""
        return walk(batch, chosen, depth)

    def settle(
        self,
        batch: TreeBatch,
        verdict: Verdict,
        next_slots: Tensor,
        table: Tensor,
        replayed: Tensor | None = None,
    ) -> None:
        """See `StepOperations`."""
        forget = table.shape[1] - 1
        kept = torch.cat((batch.given, batch.given.new_zeros(1)))
        path = verdict.path
        if path.shape[1]:
            kept.index_fill_(0, torch.where(path < 0, len(batch), path).reshape(-1), 1)
        stays = kept[:-1] == 1
        if replayed is not None:
            stays &= replayed == 0
        at = torch.where(stays, batch.positions, forget)
        table[batch.row_ids[batch.row_of], at] = batch.slots
        at = torch.where(next_slots != TRASH, batch.positions[verdict.leaf] + 1, forget)
        table[batch.row_ids, at.clamp_max(forget)] = next_slots


def step_operations_for(device: torch.device) -> StepOperations:
    """Fused kernels on NVIDIA GPUs, torch elsewhere."""
    if not fits_triton(device):
        return TorchSteps()
    from spec_serve.spec.fused_steps import FusedSteps

    return FusedSteps()
