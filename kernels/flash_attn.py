"""vLLM's FlashAttention as a backend: chains by its causal mask, trees in two parts.

Of a tree the library attends to the cached prefix and torch to the few nodes of the twig; both know
the sum of their weights, so the results are merged by log-sum-exp. Its third version (Hopper) reads
K and V where they lie, a slot being a page; for the second they are copied together first. The
structure is read on the host once per forward, so this can't be captured in a graph. Written
against vllm-flash-attn 2.6.2 and the copy inside vLLM. Knows batches and pools; no models.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.reference import TorchPlan

PLACES = ("vllm.vllm_flash_attn", "vllm_flash_attn")
"""Modules that hold the library, the newer one first."""

SUMS = ("return_softmax_lse", "return_attn_probs")
"""What newer and older versions call it when log-sums are to be returned."""

WIDEST = 256  # head_dim, a multiple of 8
DTYPES = (torch.float16, torch.bfloat16)


def place() -> str:
    """The module that will be used, "" if none is installed; imports nothing."""
    for name in PLACES:
        package, _, inner = name.partition(".")
        found = importlib.util.find_spec(package)
        if found is None:
            continue
        if not inner or any(
            (Path(at) / inner).is_dir() for at in found.submodule_search_locations or ()
        ):
            return name
    return ""


@dataclass(frozen=True, slots=True)
class Library:
    """Its one function that is used, flash_attn_varlen_func.

    version: what is asked of it, 2 or 3; 0 where it knows no versions. sums: the parameter that
    adds the log-sums to what it returns; without dropout `return_attn_probs` adds no matrix.
    """

    function: Callable[..., Any]
    version: int = 0
    sums: str = "return_softmax_lse"

    @property
    def pages(self) -> bool:
        """Whether K and V can be read by slot; older versions want pages of 16."""
        return self.version == 3

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
        """Outputs [T, heads, D] and the natural logarithms of the sums of weights, [heads, T]."""
        more[self.sums] = True
        if self.version:
            more["fa_version"] = self.version
        made = self.function(q, k, v, **more)
        return made[0], made[1]


def library(device: torch.device) -> Library:
    """What is installed, in the newest version the device has. ImportError if nothing is."""
    name = place()
    if not name:
        raise ImportError("vllm-flash-attn is not installed")
    module = importlib.import_module(name)
    function = module.flash_attn_varlen_func
    known = inspect.signature(function).parameters
    if "fa_version" not in known:
        return Library(function, 0, next(name for name in SUMS if name in known))
    return Library(function, 3 if module.is_fa_version_supported(3, device) else 2)


def plain(pool: Tensor) -> Tensor:
    """A pool, or its bytes: torch can't index every dtype of eight bits."""
    return pool.view(torch.uint8) if pool.dtype.itemsize == 1 else pool


def taken(pool: Tensor, slots: Tensor) -> Tensor:
    """pool[slots]"""
    return plain(pool)[slots].view(pool.dtype)


class Ragged:
    """Queries and keys of one call: nodes of the batch, and slots per sequence."""

    def __init__(self, nodes: list[Tensor], slots: list[Tensor]) -> None:
        self._slots = slots
        self.nodes = torch.cat(nodes)  # [T]
        device = self.nodes.device
        counts, sizes = [len(part) for part in nodes], [len(part) for part in slots]
        self.queries = _ends(counts, device)
        self.keys = _ends(sizes, device)
        self.used = self.keys.diff()
        self.most_queries, self.most_keys = max(counts), max(sizes)

    @cached_property
    def order(self) -> Tensor:
        """Slots of all keys, one sequence after the other. # [K]"""
        return torch.cat(self._slots)

    @cached_property
    def table(self) -> Tensor:
        """The same as pages of each sequence, zeros behind its last. # [sequences, most] int32"""
        padded = torch.nn.utils.rnn.pad_sequence(self._slots, batch_first=True)
        return padded.to(torch.int32)


def _ends(counts: list[int], device: torch.device) -> Tensor:
    sums = torch.tensor([0, *counts]).cumsum(0)
    return sums.to(device=device, dtype=torch.int32)


@dataclass(frozen=True, slots=True)
class Trees:
    """Rows that are trees, padded to the largest. nodes: [R, n] of the batch. slots: [R, S] of the
    twigs. seen: [R, n, S]. real: [T], which of the R * n are nodes."""

    nodes: Tensor
    slots: Tensor
    seen: Tensor
    real: Tensor

    def attend(self, q: Tensor, kv: LayerKV, scale: float, cap: float) -> tuple[Tensor, Tensor]:
        """Of all nodes [N] to their twigs: [T, heads, D] float32, and log-sums [T, heads]."""
        rows, count = self.nodes.shape
        heads, dim = q.shape[1:]
        k, v = (
            taken(kv.k, self.slots).float(),
            taken(kv.v, self.slots).float(),
        )  # [R, S, kv heads, D]
        asked = q[self.nodes].float().view(rows, count, k.shape[2], -1, dim)
        scores = torch.einsum("rnkgd,rskd->rnkgs", asked, k) * scale
        if cap:
            scores = torch.tanh(scores / cap) * cap
        scores = scores.masked_fill(~self.seen[:, :, None, None], float("-inf"))
        sums = scores.logsumexp(-1)  # [R, n, kv heads, group]
        mixed = torch.einsum("rnkgs,rskd->rnkgd", (scores - sums[..., None]).exp(), v)
        flat = mixed.reshape(rows * count, heads, dim)
        return flat[self.real], sums.reshape(rows * count, heads)[self.real]


@dataclass(frozen=True, slots=True)
class Parts:
    """A batch for layers of one window. alone: rows for the reference. at: place of the prefixes'
    queries among the trees' nodes."""

    chains: Ragged | None
    trees: Trees | None
    prefixes: Ragged | None
    at: Tensor | None
    alone: tuple[int, ...]


class FlashAttnPlan(TorchPlan):
    """Attention of one batch, see `kernels/base.py`."""

    def __init__(self, batch: TreeBatch, table: Tensor, first: int, found: Library) -> None:
        super().__init__(batch, table, first, exact=False)
        self._library = found
        self._parts_of: dict[int | None, Parts] = {}

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
        """Write k and v, then attend; ValueError for what FlashAttention has no kernels for."""
        if q.shape[2] % 8 or q.shape[2] > WIDEST or kv.v.shape[2] != q.shape[2]:
            raise ValueError(
                f"attention: flash-attn has no kernels for head_dim {q.shape[2]} "
                f"with values of {kv.v.shape[2]}; try triton"
            )
        if q.dtype not in DTYPES:
            raise ValueError(f"attention: flash-attn has no kernels for {q.dtype}; try triton")
        for pool, new in ((kv.k, k), (kv.v, v)):
            plain(pool).index_copy_(0, self._batch.slots, plain(new.to(pool.dtype)))
        if window not in self._parts_of:
            self._parts_of[window] = self._cut(window)
        parts, cap = self._parts_of[window], softcap or 0.0
        out = torch.empty_like(q, memory_format=torch.contiguous_format)
        if parts.chains is not None:
            made, _ = self._run(q, kv, parts.chains, scale, cap, True, window)
            out[parts.chains.nodes] = made
        if parts.trees is not None:
            mixed, sums = parts.trees.attend(q, kv, scale, cap)
            if parts.prefixes is not None:
                before, logs = self._run(q, kv, parts.prefixes, scale, cap, False, None)
                share = torch.sigmoid(logs.T.float() - sums[parts.at])[..., None]
                mixed[parts.at] += share * (before.float() - mixed[parts.at])
            out[parts.trees.nodes.flatten()[parts.trees.real]] = mixed.to(q.dtype)
        for b in parts.alone:
            nodes = slice(self._node_ptr[b], self._node_ptr[b + 1])
            out[nodes] = self._alone(b, q, kv, scale, window, softcap)
        return out

    def _run(
        self, q: Tensor, kv: LayerKV, part: Ragged, scale: float, cap: float, causal: bool,
        window: int | None,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        more: dict[str, Any] = {
            "cu_seqlens_q": part.queries,
            "max_seqlen_q": part.most_queries,
            "max_seqlen_k": part.most_keys,
            "softmax_scale": scale,
            "causal": causal,
            "window_size": (-1, -1) if window is None else (window - 1, 0),
            "softcap": cap,
        }
        asked = q[part.nodes]
        if self._library.pages and kv.k.dtype == q.dtype:
            more |= {"seqused_k": part.used, "block_table": part.table}
            return self._library(asked, kv.k.unsqueeze(1), kv.v.unsqueeze(1), **more)
        keys, values = (taken(pool, part.order).to(q.dtype) for pool in (kv.k, kv.v))
        return self._library(asked, keys, values, cu_seqlens_k=part.keys, **more)

    def _cut(self, window: int | None) -> Parts:
        """Rows by how they are done, for layers with a window."""
        chain_nodes, chain_slots, trees, alone = [], [], [], []
        node = torch.arange(len(self._batch), device=self._batch.tokens.device)
        for b, prefix in enumerate(self._prefix):
            nodes = node[self._node_ptr[b] : self._node_ptr[b + 1]]
            if not len(nodes):
                continue
            if self._chain[b]:
                chain_nodes.append(nodes)
                chain_slots.append(self._slots(b, window)[0])
                continue
            deepest = max(self._positions[self._node_ptr[b] : self._node_ptr[b + 1]])
            # The library's window moves on with every query, a tree's with its depth.
            if window is not None and deepest - window + 1 > min(self._first, prefix):
                alone.append(b)
            else:
                trees.append((b, nodes))
        chains = Ragged(chain_nodes, chain_slots) if chain_nodes else None
        if not trees:
            return Parts(chains, None, None, None, tuple(alone))
        first, before, at = 0, [], []
        for b, nodes in trees:
            low, prefix = min(self._first, self._prefix[b]), self._prefix[b]
            if low < prefix:
                before.append((nodes, self._table[self._row_ids[b], low:prefix]))
                at.append(node[: len(nodes)] + first)
            first += len(nodes)
        prefixes = Ragged([n for n, _ in before], [s for _, s in before]) if before else None
        places = torch.cat(at) if at else None
        return Parts(chains, self._trees(trees), prefixes, places, tuple(alone))

    def _trees(self, rows: list[tuple[int, Tensor]]) -> Trees:
        twigs = [self._batch.twig_slots[self._twig_ptr[b] : self._twig_ptr[b + 1]] for b, _ in rows]
        most, size = max(len(nodes) for _, nodes in rows), max(map(len, twigs))
        device = twigs[0].device
        nodes = torch.zeros(len(rows), most, dtype=torch.int64, device=device)
        # What pads a row is a slot of its own, unseen: no other is sure to hold numbers.
        slots = torch.stack([twig[0].expand(size) for twig in twigs])
        seen = torch.zeros(len(rows), most, size, dtype=torch.bool, device=device)
        seen[:, :, 0] = True
        real = torch.zeros(len(rows), most, dtype=torch.bool, device=device)
        for i, ((b, own), twig) in enumerate(zip(rows, twigs, strict=True)):
            visible = self._visible(b, self._prefix[b], len(twig), None)
            assert visible is not None
            nodes[i, : len(own)], slots[i, : len(twig)] = own, twig
            seen[i, : len(own), 0] = False
            seen[i, : len(own), : len(twig)] = visible
            real[i, : len(own)] = True
        return Trees(nodes, slots, seen, real.flatten())

    def _alone(
        self, b: int, q: Tensor, kv: LayerKV, scale: float, window: int | None, cap: float | None
    ) -> Tensor:
        """A row as the reference does it."""
        slots, lowest = self._slots(b, window)
        cached = self._prefix[b] - lowest
        seen = self._visible(b, lowest, len(slots) - cached, window)
        nodes = torch.arange(self._node_ptr[b], self._node_ptr[b + 1], device=slots.device)
        every = torch.ones(1, len(nodes), dtype=torch.bool, device=slots.device)
        shown = every.new_ones(len(nodes), len(slots)) if seen is None else seen
        row = Trees(nodes[None], slots[None], shown[None], every.flatten())
        return row.attend(q, kv, scale, cap or 0.0)[0].to(q.dtype)


class FlashAttention:
    """vLLM's FlashAttention as a backend. found: the library; None = what is installed."""

    name = "flash-attn"

    def __init__(self, device: torch.device | str, found: Library | None = None) -> None:
        self._library = found or library(torch.device(device))

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> FlashAttnPlan:
        """Prepare one forward; table [rows, positions] holds the slots of cached tokens."""
        return FlashAttnPlan(batch, table, first, self._library)
