"""Attention that asks the device nothing, in a few lines of torch: what graphs on a CPU run with.

Every node is compared with every position of the table and every node of the twigs, and masks say
what counts. Slow and wide, but of fixed shapes. Imported by tests only.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_serve.cache.batch import WORD, TreeBatch
from spec_serve.cache.pool import LayerKV


class DensePlan:
    def __init__(self, batch: TreeBatch, table: Tensor, first: int) -> None:
        self._batch = batch
        count, stored = len(batch.twig_slots), table.shape[1] - 1
        nodes, row = torch.arange(count), batch.row_of
        owner = torch.searchsorted(batch.twig_ptr, nodes, right=True) - 1
        number = nodes - batch.twig_ptr[owner]  # of each twig node in its row
        words = batch.ancestors[:, (number // WORD).clamp_max(batch.ancestors.shape[1] - 1)]
        own = torch.where(
            batch.chain[row, None] == 1,
            nodes[None] <= torch.arange(len(batch))[:, None],
            (words >> (number % WORD)) & 1 == 1,
        )
        twig = own & (owner[None] == row[:, None])
        place = torch.arange(stored)
        cached = (place < batch.prefix[row, None]) & (place >= first)
        self._mask = torch.cat((cached, twig), 1)  # [N, P + S]
        held = table[batch.row_ids[row], :stored]
        self._slots = torch.cat((held, batch.twig_slots.expand(len(batch), -1)), 1)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, kv: LayerKV, *, scale: float,
        window: int | None = None, softcap: float | None = None,
    ) -> Tensor:  # fmt: skip
        assert window is None and softcap is None
        kv.k.index_copy_(0, self._batch.slots, k)
        kv.v.index_copy_(0, self._batch.slots, v)
        group = q.shape[1] // k.shape[1]
        keys = kv.k[self._slots].repeat_interleave(group, 2)  # [N, L, heads, D]
        values = kv.v[self._slots].repeat_interleave(group, 2)
        scores = torch.einsum("nhd,nlhd->nhl", q, keys) * scale
        weights = scores.masked_fill(~self._mask[:, None], float("-inf")).softmax(-1)
        return torch.einsum("nhl,nlhd->nhd", weights, values)


class DenseAttention:
    """An `AttentionBackend` without windows and soft-caps."""

    name = "dense"

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> DensePlan:
        return DensePlan(batch, table, first)
