"""The K/V tensors of every layer of target and drafts, and the table from row position to slot.

A slot index means the same token in all layers of all models. Slot 0 is TRASH: padding may be
written there, nothing is ever read from it. Which slots are free is not known here (cache/slots.py)
and neither is whose they are (cache/store.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

TRASH = 0


@dataclass(frozen=True, slots=True)
class KVSpec:
    """What one attention layer keeps per token: `heads` K/V heads of `head_dim` values each.

    latent: a V of its own is not kept, it is the first so many values of K; 0 = it is.
    """

    heads: int
    head_dim: int
    dtype: torch.dtype
    latent: int = 0

    @property
    def bytes_per_slot(self) -> int:
        kept = 1 if self.latent else 2
        return kept * self.heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class LayerKV:
    """K and V of one layer, [slots, heads, head_dim] each.

    Over latents V is the beginning of K, a view: [slots, 1, latent].
    """

    k: Tensor
    v: Tensor

    @property
    def shared(self) -> bool:
        """Whether writing K writes V as well."""
        return self.v.data_ptr() == self.k.data_ptr()


class KVPool:
    """`slots` usable slots (1..slots; slot 0 is TRASH) in every layer of `specs`.

    table: [rows, positions + 1] int64, the slot of each row's cached token at each position; its
    last column takes writes that are to be forgotten.
    """

    def __init__(
        self,
        specs: Sequence[KVSpec],
        slots: int,
        rows: int,
        positions: int,
        device: torch.device | str = "cpu",
    ) -> None:
        self.specs = tuple(specs)
        self.slots = slots
        self.device = torch.device(device)
        self.layers = [_layer(slots + 1, spec, self.device) for spec in self.specs]
        self.table = torch.zeros(rows, positions + 1, dtype=torch.int64, device=device)

    def assign(self, row: int, start: int, slots: Sequence[int]) -> None:
        """Write `slots` into the table for positions start.. of `row`."""
        if slots:
            self.table[row, start : start + len(slots)] = torch.tensor(
                slots, dtype=torch.int64, device=self.device
            )


def _layer(slots: int, spec: KVSpec, device: torch.device) -> LayerKV:
    k = _zeros(slots, spec, device)
    return LayerKV(k, k[:, :, : spec.latent] if spec.latent else _zeros(slots, spec, device))


def _zeros(slots: int, spec: KVSpec, device: torch.device) -> Tensor:
    """Zeros, so that no slot ever holds a NaN. On the host untouched pages take no memory."""
    shape = (slots, spec.heads, spec.head_dim)
    if device.type != "cpu":
        return torch.zeros(shape, dtype=spec.dtype, device=device)
    # numpy asks the system for zeroed pages; torch would write every one of them.
    count = slots * spec.heads * spec.head_dim
    raw = np.zeros(count * spec.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(raw).view(spec.dtype).view(shape)


def bytes_per_slot(specs: Sequence[KVSpec]) -> int:
    """Bytes one token's K/V takes in all layers together."""
    return sum(spec.bytes_per_slot for spec in specs)
