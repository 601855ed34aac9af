"""How a transformer's blocks are run: one after the other in torch, or by fused kernels.

A model asks its `Operations` for what lies between embedding and head. The torch ones call each
block as it is and are the specification; target/fused.py has those for NVIDIA GPUs. Which a model
gets is decided once, when it is put to use. Knows blocks; no checkpoints, no batches.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Sequence
from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.base import AttentionPlan
from spec_serve.target.layers import Block, RMSNorm
from spec_serve.target.rope import Rotation


class Operations(Protocol):
    """What runs a model's blocks. name: for people."""

    name: str

    def through(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        rotation: Rotation,
        local: Rotation,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: Collection[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """The residual stream x [N or more, H] after all blocks, and at the boundaries asked for
        (0 is always there). local: rotation of the layers with a window."""
        ...

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """A norm outside the blocks, [M, H]."""
        ...


class TorchOperations:
    """Block after block, each as its class says."""

    name = "torch"

    def through(
        self,
        blocks: Sequence[Block],
        x: Tensor,
        rotation: Rotation,
        local: Rotation,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: Collection[int],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """See `Operations`."""
        tapped = {0: x}
        for i, (block, kv) in enumerate(zip(blocks, layers, strict=True), 1):
            x = block(x, rotation if block.attention.window is None else local, kv, plan)
            if i in taps:
                tapped[i] = x
        return x, tapped

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """See `Operations`."""
        return norm(x)


def fits_triton(device: torch.device) -> bool:
    """Whether Triton's kernels are what a device runs with."""
    return device.type == "cuda" and importlib.util.find_spec("triton") is not None


def operations_for(device: torch.device) -> Operations:
    """Fused kernels on NVIDIA GPUs, torch elsewhere."""
    if not fits_triton(device):
        return TorchOperations()
    from spec_serve.target.fused import FusedOperations

    return FusedOperations()
