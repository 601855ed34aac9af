"""A transformer's blocks by fused kernels: additions join the norms, rotation joins the K/V write.

Between two matrices there is one launch where torch has up to ten. Equals `TorchOperations` but for
the last bit of half-precision roundings. Parts it has no kernel for (experts, latent attention,
other activations than SiLU, partial rotation, other backends than Triton's) run as they are.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Protocol, runtime_checkable

import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.pool import LayerKV
from spec_serve.kernels import fused
from spec_serve.kernels.base import AttentionPlan
from spec_serve.target.layers import MLP, Attention, Block, FeedForward, RMSNorm, SelfAttention
from spec_serve.target.rope import Rotation


@runtime_checkable
class WrittenPlan(Protocol):
    """A plan that can attend where the nodes' K and V are in the pool already."""

    @property
    def slots(self) -> Tensor:
        """[N] where the batch's K and V belong."""
        ...

    def attend_written(
        self,
        q: Tensor,
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """q [N, heads, D] -> [N, heads, D]."""
        ...


class FusedOperations:
    """See `target.operations.Operations`."""

    name = "fused"

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
        """The blocks, each addition to the residual stream done by the norm that follows it."""
        tapped = {0: x}
        made: Tensor | None = None  # what the block before adds to x
        for i, (block, kv) in enumerate(zip(blocks, layers, strict=True)):
            if made is None:
                read = self.norm(block.attention_norm, x)
            else:
                read, x = add_norm(block.attention_norm, made, x)
            if i in taps:
                tapped[i] = x
            turned = rotation if block.attention.window is None else local
            mixed = attended(block.attention, read, turned, kv, plan)
            if block.after_attention is not None:
                mixed = self.norm(block.after_attention, mixed)
            read, x = add_norm(block.mlp_norm, mixed, x)
            made = gated(block.mlp, read, rotation[0].shape[0])
            if block.after_mlp is not None:
                made = self.norm(block.after_mlp, made)
        if made is not None:
            x = x + made
        tapped[len(blocks)] = x
        return x, tapped

    def norm(self, norm: RMSNorm, x: Tensor) -> Tensor:
        """`RMSNorm`, [N, H]."""
        return fused.rms_norm(x, norm.weight, norm.eps)


def add_norm(norm: RMSNorm, made: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The norm of x + made, and that sum."""
    return fused.add_rms_norm(made, x, norm.weight, norm.eps)


def attended(
    attention: SelfAttention, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan
) -> Tensor:
    """`Attention`, with norms, rotation and the K/V write in one launch."""
    if not (
        isinstance(attention, Attention)
        and isinstance(plan, WrittenPlan)
        and rotation[0].shape[-1] == attention.head_dim
    ):
        return attention(x, rotation, kv, plan)
    nodes, rows = rotation[0].shape[0], x.shape[0]
    norms, eps = None, 0.0
    if attention.q_norm is not None and attention.k_norm is not None:
        norms = attention.q_norm.weight, attention.k_norm.weight
        eps = attention.q_norm.eps
    q = fused.rope_and_store(
        attention.qkv(x), rotation, kv, plan.slots, attention.heads, norms, eps
    )  # [N, heads, D]
    mixed = plan.attend_written(
        q, kv, scale=attention.scale, window=attention.window, softcap=attention.softcap
    ).view(nodes, -1)
    if nodes != rows:
        mixed = F.pad(mixed, (0, 0, 0, rows - nodes))
    return attention.out(mixed)


def gated(mlp: FeedForward, x: Tensor, nodes: int) -> Tensor:
    """`MLP`, with the gate in one launch. nodes: rows beyond are padding."""
    if not isinstance(mlp, MLP) or mlp.act is not F.silu:
        return mlp(x, nodes)
    return mlp.down(fused.silu_mul(mlp.gate_up(x)))
