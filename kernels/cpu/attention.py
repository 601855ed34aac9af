"""The attention backend of compiled models: their forward attends itself and needs only the facts.

A plan here is what the forward is told; `attend`, layer by layer, is for models that run in torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.reference import TorchAttention


@dataclass(frozen=True, slots=True)
class NativePlan:
    """One batch, the table of slots and the first cached position that is seen."""

    batch: TreeBatch
    table: Tensor
    first: int

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """As the reference does."""
        plan = TorchAttention(exact=True).plan(self.batch, self.table, self.first)
        return plan.attend(q, k, v, kv, scale=scale, window=window, softcap=softcap)


class NativeAttention:
    """The backend of target/native.py's models."""

    name = "native"

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> NativePlan:
        """Nothing is prepared: the compiled forward reads the batch as it is."""
        return NativePlan(batch, table, first)
