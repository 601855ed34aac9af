"""Attention in plain torch: the specification every faster kernel is tested against.

Works row by row, so that a row's result cannot depend on its neighbours. What depends on the
structure alone (slots, masks) is made once per plan and shared by all layers. Knows tensors and
batches; not models.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.batch import WORD, TreeBatch
from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.ordered import (
    OrderedGroup,
    Part,
    chain_parts,
    grouped,
    in_order,
    tree_parts,
)


@dataclass(slots=True)
class _View:
    """What one row's queries see. keys: slots of the L keys, as a slice where they are consecutive.

    mask: [n, L] additive (0 or -inf), None = everything is seen, or `causal`.
    """

    queries: slice
    keys: slice | Tensor
    mask: Tensor | None
    causal: bool


class TorchPlan:
    """Attention of one batch, see `kernels/base.py`."""

    def __init__(self, batch: TreeBatch, table: Tensor, first: int, exact: bool) -> None:
        self._batch = batch
        self._table = table
        self._first = first
        self._exact = exact
        # The structure on the host: one copy, and so one wait for the device, per forward.
        rows, nodes = batch.rows, len(batch)
        parts = (batch.node_ptr, batch.twig_ptr, batch.prefix, batch.chain, batch.row_ids)
        host: list[int] = torch.cat((*parts, batch.positions)).tolist()
        self._node_ptr, host = host[: rows + 1], host[rows + 1 :]
        self._twig_ptr, host = host[: rows + 1], host[rows + 1 :]
        self._prefix, self._chain, self._row_ids = (
            host[i * rows : (i + 1) * rows] for i in range(3)
        )
        self._positions = host[3 * rows :]
        assert len(self._positions) == nodes
        self._groups: dict[tuple[int | None, int, int, int, int], list[OrderedGroup]] = {}
        self._views: dict[tuple[int | None, torch.dtype], list[_View]] = {}

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
        """Write k and v, then attend; q [N, heads, D] -> [N, heads, width of a value]."""
        kv.k.index_copy_(0, self._batch.slots, k)
        if not kv.shared:
            kv.v.index_copy_(0, self._batch.slots, v)
        if self._exact and softcap is None and _can_order(q, k, v):
            return self._ordered(q, kv, scale, window)
        inner = torch.float64 if self._exact else q.dtype
        views = self._views.get((window, inner))
        if views is None:
            views = [self._view(b, window, inner) for b in range(len(self._row_ids))]
            self._views[window, inner] = views
        queries = q.to(inner)
        outs = [_attend_row(queries, kv, view, scale, softcap) for view in views]
        return (outs[0] if len(outs) == 1 else torch.cat(outs)).to(q.dtype)

    def _ordered(self, q: Tensor, kv: LayerKV, scale: float, window: int | None) -> Tensor:
        pool, kv_heads, dim = kv.k.shape
        value = kv.v.shape[2]
        if kv_heads == 1:  # a batch of one is a plain product to torch, which sums differently
            kv_heads, kv = 2, LayerKV(kv.k.expand(-1, 2, -1), kv.v.expand(-1, 2, -1))
        shape = (q.shape[1], kv_heads, dim, value)
        groups = self._groups.get((window, *shape))
        if groups is None:
            parts = [part for b in range(len(self._row_ids)) for part in self._parts(b, window)]
            groups = grouped(parts, *shape, pool)
            self._groups[window, *shape] = groups
        if len(groups) == 1 and isinstance(groups[0].nodes, slice):
            return groups[0].attend(q, kv, scale)
        out = q.new_empty(len(q), q.shape[1], value)
        for group in groups:
            out[group.nodes] = group.attend(q[group.nodes], kv, scale)
        return out

    def _parts(self, b: int, window: int | None) -> Iterator[Part]:
        start, stop = self._node_ptr[b], self._node_ptr[b + 1]
        slots, lowest = self._slots(b, window)
        if self._chain[b]:
            yield from chain_parts(start, stop - start, slots, lowest, window)
            return
        cached = self._prefix[b] - lowest
        seen = self._visible(b, lowest, len(slots) - cached, window)
        assert seen is not None
        twig = seen[:, cached:]
        # A path's nodes follow each other: the i-th last key a query sees lies i - 1 before it.
        behind = twig.flip(1).cumsum(1).flip(1) - 1
        places = self._batch.positions[start:stop, None] - behind
        positions = torch.cat(
            (
                torch.arange(lowest, lowest + cached),
                places.masked_fill_(~twig, -1).amax(0),
            )
        )
        yield from tree_parts(start, slots, positions, seen)

    def _slots(self, b: int, window: int | None) -> tuple[Tensor, int]:
        """Slots of all keys that some query of row b may see; the first one's position."""
        start, stop = self._node_ptr[b], self._node_ptr[b + 1]
        prefix = self._prefix[b]
        twig = self._batch.twig_slots[self._twig_ptr[b] : self._twig_ptr[b + 1]]  # [S]
        lowest = self._first
        if window is not None:
            lowest = max(lowest, min(self._positions[start:stop]) - window + 1)
        lowest = min(lowest, prefix)
        return torch.cat((self._table[self._row_ids[b], lowest:prefix], twig)), lowest  # [L]

    def _view(self, b: int, window: int | None, dtype: torch.dtype) -> _View:
        start, stop = self._node_ptr[b], self._node_ptr[b + 1]
        prefix, n = self._prefix[b], stop - start
        slots, lowest = self._slots(b, window)
        visible = self._visible(b, lowest, len(slots) - (prefix - lowest), window)  # [n, L] or None
        if visible is not None and n == 1:
            slots, visible = slots[visible[0]], None  # a lone node's keys need no mask
        keys = _as_slice(slots)
        if visible is None:
            return _View(slice(start, stop), keys, None, False)
        if self._chain[b] and lowest == prefix and (window is None or window >= n):
            return _View(slice(start, stop), keys, None, True)
        mask = torch.zeros(visible.shape, dtype=dtype, device=visible.device)
        return _View(slice(start, stop), keys, mask.masked_fill_(~visible, float("-inf")), False)

    def _visible(self, b: int, lowest: int, size: int, window: int | None) -> Tensor | None:
        """Which of the prefix from `lowest` on and of the `size` twig nodes each query sees."""
        start, stop = self._node_ptr[b], self._node_ptr[b + 1]
        prefix, batch = self._prefix[b], self._batch
        device = batch.positions.device
        if self._chain[b]:
            if stop - start == 1:
                return None  # `lowest` has cut what lies outside the window
            twig = torch.ones(size, size, dtype=torch.bool, device=device).tril()
        else:
            node = torch.arange(size, device=device)
            words = batch.ancestors[start:stop, node // WORD]  # [n, S]
            twig = (words >> (node % WORD)) & 1 != 0
        columns = torch.arange(lowest, prefix, device=device)
        if window is None:
            cached = torch.ones(stop - start, prefix - lowest, dtype=torch.bool, device=device)
        else:
            positions = batch.positions[start:stop, None]
            cached = columns[None] > positions - window  # [n, prefix - lowest]
            # Along a path nodes follow each other in index order, so the number of visible nodes
            # from j on is 1 + the distance from the query up to j.
            distance = twig.flip(1).cumsum(1).flip(1)
            twig = twig & (distance <= window)
        return torch.cat((cached, twig), 1)


def _can_order(q: Tensor, k: Tensor, v: Tensor) -> bool:
    kv_heads = max(k.shape[1], 2)
    return (
        q.device.type == "cpu"
        and q.dtype == torch.float32
        and q.shape[1] % kv_heads == 0
        and in_order(kv_heads, k.shape[2], torch.get_num_threads(), v.shape[2])
    )


def _as_slice(slots: Tensor) -> slice | Tensor:
    """Consecutive slots as a slice: a view of the pool instead of a copy.

    Only on the host: elsewhere the look would cost more than the copy.
    """
    if slots.device.type != "cpu":
        return slots
    low = int(slots[0])
    run = torch.arange(low, low + slots.shape[0], device=slots.device)
    return slice(low, low + slots.shape[0]) if torch.equal(slots, run) else slots


def _attend_row(q: Tensor, kv: LayerKV, view: _View, scale: float, softcap: float | None) -> Tensor:
    """[n, heads, width of a value] of one row."""
    keys = view.keys
    if isinstance(keys, slice):
        k, v = kv.k[keys], kv.v[keys]  # [L, kv heads, D]
    else:
        k, v = kv.k.index_select(0, keys), kv.v.index_select(0, keys)
    k, v = k.to(q.dtype).transpose(0, 1), v.to(q.dtype).transpose(0, 1)  # [kv heads, L, D]
    q = q[view.queries].transpose(0, 1)  # [heads, n, D]
    heads, n, dim = q.shape
    if softcap is None:
        if n == 1 and q.dtype.itemsize == 2:
            # torch's path for grouped heads is slow for one query in half precision; to a lone
            # node the heads of a group are just as many queries.
            q = q.reshape(k.shape[0], -1, dim)
        out = F.scaled_dot_product_attention(
            q[None],
            k[None],
            v[None],
            attn_mask=view.mask,
            is_causal=view.causal,
            scale=scale,
            enable_gqa=q.shape[0] != k.shape[0],
        )
        return out[0].reshape(heads, n, -1).transpose(0, 1)
    wide = torch.promote_types(q.dtype, torch.float32)
    folded = q.reshape(k.shape[0], -1, dim).to(wide)  # [kv heads, group * n, D]
    scores = torch.bmm(folded, k.to(wide).transpose(1, 2)).view(heads, n, -1) * scale
    scores = torch.tanh(scores / softcap) * softcap  # [heads, n, L]
    if view.mask is not None:
        scores = scores + view.mask
    elif view.causal:
        unseen = torch.ones(n, n, dtype=torch.bool, device=q.device).triu(1)
        scores = scores.masked_fill(unseen, float("-inf"))
    weights = scores.softmax(-1).view(k.shape[0], -1, scores.shape[-1])
    return torch.bmm(weights, v.to(wide)).view(heads, n, -1).transpose(0, 1).to(q.dtype)


class TorchAttention:
    """The torch reference as a backend: runs on any device and in any float dtype.

    exact: a token's result is the same bits whether it ran alone, in a chunk, a chain or a tree.
    In float32 on a CPU whose BLAS allows it the sums are taken in an order of their own
    (`kernels/ordered.py`). Else they are float64, and rounding to the model's dtype at the end
    hides in which order they were taken, but for about one value in 10^7.
    """

    name = "torch"

    def __init__(self, exact: bool = False) -> None:
        self.exact = exact

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> TorchPlan:
        """Prepare one forward; table [rows, positions] holds the slots of cached tokens."""
        return TorchPlan(batch, table, first, self.exact)
