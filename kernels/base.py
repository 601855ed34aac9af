"""The seam between models and attention kernels, and the choice of a backend.

A model plans once per forward and then calls `attend` once per layer; it never asks the device.
Rules every backend obeys: K/V of the batch's nodes are written to `batch.slots` first; then each
node sees all cached tokens of its row from position `first` on (the table's slots) and, of its
row's twig, its ancestors and itself.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV

# bfloat16 products in hardware begin with this compute capability.
OLDEST = (8, 0)


class AttentionPlan(Protocol):
    """Attention for one batch; made by `AttentionBackend.plan`."""

    def attend(
        self,
        q: Tensor,  # [N, query heads, head_dim], after RoPE
        k: Tensor,  # [N, kv heads, head_dim], after RoPE
        v: Tensor,  # [N, kv heads, head_dim], over latents the beginning of k
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write k, v to the pool, attend, return [N, query heads, channels of v].

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
    """The backend for a device: "torch" (the reference, which runs anywhere), "triton",
    "flashinfer", "flash-attn" or "auto".

    auto: Triton's on an NVIDIA GPU that it serves, else torch's. On a CPU attention is exact: a
    token's bits do not depend on the tree it was computed in. ValueError says why not.
    """
    from spec_serve.kernels.reference import TorchAttention

    device = torch.device(device)
    if name not in ("auto", "torch", *_MAKERS):
        choices = "auto, torch, triton, flashinfer or flash-attn"
        raise ValueError(f"attention: unknown backend {name!r}; choose {choices}")
    if name != "torch":
        library = "triton" if name == "auto" else name
        reason = unfit(device, library)
        if not reason:
            return _MAKERS[library](device)
        if name != "auto":
            raise ValueError(f"attention: {reason}")
    return TorchAttention(exact=device.type == "cpu")


def unfit(device: torch.device, library: str) -> str:
    """Why the kernels of "triton", "flashinfer" or "flash-attn" can't run on a device; empty if
    they can."""
    if device.type != "cuda":
        return f"{library}'s kernels run on NVIDIA GPUs, not on {device.type}"
    if not torch.cuda.is_available():
        return f"{library}'s kernels need an NVIDIA GPU, and torch finds none"
    if torch.cuda.get_device_capability(device) < OLDEST:
        return f"{library}'s kernels need compute capability {OLDEST[0]}.{OLDEST[1]}"
    if library == "flash-attn":
        from spec_serve.kernels.flash_attn import place

        if not place():
            return "vllm-flash-attn is not installed; pip install 'spec-serve[flash-attn]'"
    elif importlib.util.find_spec(library) is None:
        return f"{library} is not installed; pip install 'spec-serve[gpu]'"
    return ""


def _flashinfer(device: torch.device) -> AttentionBackend:
    from spec_serve.kernels.flashinfer import FlashInferAttention

    return FlashInferAttention(device)


def _flash_attn(device: torch.device) -> AttentionBackend:
    from spec_serve.kernels.flash_attn import FlashAttention

    return FlashAttention(device)


def _triton(device: torch.device) -> AttentionBackend:
    from spec_serve.kernels.attention_tuning import TunedTiles
    from spec_serve.kernels.tree_attention import TritonAttention

    processors = torch.cuda.get_device_properties(device).multi_processor_count
    return TritonAttention(processors, TunedTiles(device))


_MAKERS: dict[str, Callable[[torch.device], AttentionBackend]] = {
    "triton": lambda device: _triton(device),  # looked up when it is called: tests replace it
    "flashinfer": _flashinfer,
    "flash-attn": _flash_attn,
}
