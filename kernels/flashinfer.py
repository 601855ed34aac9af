"""FlashInfer's paged prefill as a backend: chains by its causal mask, trees by a mask of bits.

A slot is a page of one token. FlashInfer plans on the host, once per forward and kind of layer,
from the structure that the torch reference reads too; so this backend waits for the device once per
forward and can't be captured in a graph. Written against flashinfer-python 0.7, whose package is
imported when the first wrapper is made. Knows batches and pools; no models.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.reference import TorchPlan

# What its generated kernels exist for.
HEAD_DIMS = (64, 128, 256)
WORKSPACE = 128 << 20


class Wrapper(Protocol):
    """What is used of BatchPrefillWithPagedKVCacheWrapper."""

    def plan(self, *args: Any, **kwargs: Any) -> None: ...
    def run(self, q: Tensor, paged_kv_cache: tuple[Tensor, Tensor]) -> Tensor: ...


Kind = tuple[int | None, float | None, float, int, int, int, torch.dtype, torch.dtype]
"""Window, soft-cap, scale, heads, K/V heads, head_dim, dtypes of queries and pool."""


class FlashInferPlan(TorchPlan):
    """Attention of one batch, see `kernels/base.py`."""

    def __init__(
        self, batch: TreeBatch, table: Tensor, first: int, wrapper: Callable[[Kind], Wrapper]
    ) -> None:
        super().__init__(batch, table, first, exact=False)
        self._wrapper = wrapper
        self._planned: dict[Kind, Wrapper] = {}

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
        """Write k and v, then attend; ValueError for a head_dim FlashInfer has no kernels for."""
        _, heads, dim = q.shape
        if dim not in HEAD_DIMS:
            raise ValueError(f"attention: flashinfer has no kernels for head_dim {dim}; try triton")
        slots = self._batch.slots
        kv.k.index_copy_(0, slots, k.to(kv.k.dtype))
        kv.v.index_copy_(0, slots, v.to(kv.v.dtype))
        kind = (window, softcap, scale, heads, kv.k.shape[1], dim, q.dtype, kv.k.dtype)
        wrapper = self._planned.get(kind)
        if wrapper is None:
            wrapper = self._planned[kind] = self._plan(kind)
        return wrapper.run(q.contiguous(), (kv.k.unsqueeze(1), kv.v.unsqueeze(1)))

    def _plan(self, kind: Kind) -> Wrapper:
        window, softcap, scale, heads, kv_heads, dim, dtype, kv_dtype = kind
        keys, masks, ends = [], [], [0]
        chains = all(self._chain)
        for b, prefix in enumerate(self._prefix):
            slots, lowest = self._slots(b, window)
            keys.append(slots)
            ends.append(ends[-1] + len(slots))
            if not chains:
                nodes = self._node_ptr[b + 1] - self._node_ptr[b]
                size = len(slots) - (prefix - lowest)
                seen = self._visible(b, lowest, size, window)
                masks.append((slots.new_ones(nodes, len(slots)) if seen is None else seen).bool())
        wrapper = self._wrapper(kind)
        wrapper.plan(
            torch.tensor(self._node_ptr, dtype=torch.int32),
            torch.tensor(ends, dtype=torch.int32),
            torch.cat(keys).to(torch.int32),
            torch.ones(len(keys), dtype=torch.int32),
            heads,
            kv_heads,
            dim,
            1,
            custom_mask=None if chains else torch.cat([mask.reshape(-1) for mask in masks]),
            causal=chains,
            sm_scale=scale,
            window_left=-1 if window is None or not chains else window - 1,
            logits_soft_cap=softcap,
            q_data_type=dtype,
            kv_data_type=kv_dtype,
        )
        return wrapper


class FlashInferAttention:
    """FlashInfer as a backend. make: a new wrapper; None = FlashInfer's own on `device`.

    Wrappers are kept by kind of layer: one holds the plan of one forward at a time.
    """

    name = "flashinfer"

    def __init__(
        self, device: torch.device | str, make: Callable[[], Wrapper] | None = None
    ) -> None:
        self._device = torch.device(device)
        self._make = make or self._real
        self._wrappers: dict[Kind, Wrapper] = {}
        self._workspace: Tensor | None = None

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> FlashInferPlan:
        """Prepare one forward; table [rows, positions] holds the slots of cached tokens."""
        return FlashInferPlan(batch, table, first, self._of)

    def _of(self, kind: Kind) -> Wrapper:
        if kind not in self._wrappers:
            self._wrappers[kind] = self._make()
        return self._wrappers[kind]

    def _real(self) -> Wrapper:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        if self._workspace is None:  # for partial results: layers follow each other and share it
            self._workspace = torch.zeros(WORKSPACE, dtype=torch.uint8, device=self._device)
        made: Wrapper = BatchPrefillWithPagedKVCacheWrapper(self._workspace, "NHD")
        return made
