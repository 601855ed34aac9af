"""The seam between models and attention kernels, and the choice of a backend.

A model plans once per forward and then calls `attend` once per layer; it never asks the device.
Rules every backend obeys: K/V of the batch's nodes are written to `batch.slots` first; then each
node sees all cached tokens of its row from position `first` on (the table's slots) and, of its
row's twig, its ancestors and itself.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV


class AttentionPlan(Protocol):
    """Attention for one batch; made by `AttentionBackend.plan`."""

    def attend(
        self,
        q: Tensor,  # [N, query heads, head_dim], after RoPE
        k: Tensor,  # [N, kv heads, head_dim], after RoPE
        v: Tensor,  # [N, kv heads, head_dim]
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write k, v to the pool, attend, return [N, query heads, head_dim].

        window: a node at position p sees positions p-window+1 .. p only. softcap: scores become
        softcap * tanh(score / softcap) before the softmax.
        """
        ...


class AttentionBackend(Protocol):
    """A family of kernels."""

    name: str

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> AttentionPlan:
        """Prepare one forward. table: [rows, positions]; first: first cached position seen."""
        ...


def pick_backend(device: torch.device | str, name: str = "auto") -> AttentionBackend:
    """The backend for a device: "auto" or "torch" (the reference, which runs anywhere).

    On a CPU attention is exact: a token's bits do not depend on the tree it was computed in.
    """
    from spec_serve.kernels.reference import TorchAttention

    if name not in ("auto", "torch"):
        raise ValueError(f"attention: unknown backend {name!r}; choose auto or torch")
    return TorchAttention(exact=torch.device(device).type == "cpu")
