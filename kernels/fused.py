"""Fused steps of a forward and of what follows it, in Triton: norms, rotation, gate, walk, table.

Each function stands for a torch expression of target/layers.py, target/rope.py, spec/verify.py or
spec/step.py, named in its docstring, which is its specification. They launch on the tensors'
device, read nothing back and allocate only what they return. Drawing tokens is in fused_draw.py.
"""

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV
from spec_serve.kernels import fused_programs as programs
from spec_serve.kernels.tree_attention import power

_BLOCK = 1024
# Nodes looked at together by the walk: most trees fit.
_NODES = 64


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMSNorm of x [N, H]. A float32 weight beside half-precision x multiplies before rounding."""
    return _norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(RMSNorm of x + residual, x + residual), [N, H] each."""
    return _norm(x, residual, weight, eps)


def _norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    rows, width = x.shape
    more = x if residual is None else residual
    assert x.stride(1) == more.stride(1) == weight.stride(0) == 1
    out = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    added = out if residual is None else torch.empty_like(out)
    if rows:
        programs.norm_rows[(rows,)](
            x, more, weight, out, added, eps, x.stride(0), more.stride(0), D=width,
            DIM=power(width), ADD=residual is not None, WIDE=weight.dtype == torch.float32,
            num_warps=min(max(power(width) // 512, 1), 16),
        )  # fmt: skip
    return out, added


def rope_and_store(
    qkv: Tensor,
    rotation: tuple[Tensor, Tensor],
    kv: LayerKV,
    slots: Tensor,
    heads: int,
    norms: tuple[Tensor, Tensor] | None = None,
    eps: float = 0.0,
) -> Tensor:
    """Rotated queries [N, heads, D]; rotated keys and the values go to their slots.

    qkv: [N, (heads + 2 * kv heads) * D] as the layer's matrix gives it. rotation: cos and signed
    sin, [N, 1, D] each (`Rotary.at`). norms: RMSNorm weights of queries and keys, before rotating.
    """
    nodes = rotation[0].shape[0]
    _, kv_heads, dim = kv.k.shape
    cos, sin = (part.contiguous() for part in rotation)
    assert qkv.stride(1) == 1 and qkv.shape[1] == (heads + 2 * kv_heads) * dim
    q = torch.empty((nodes, heads, dim), dtype=qkv.dtype, device=qkv.device)
    if nodes:
        q_weight, k_weight = (qkv, qkv) if norms is None else norms
        programs.rope_and_store[(nodes, heads + 2 * kv_heads)](
            qkv, cos, sin, q_weight, k_weight, q, kv.k, kv.v, slots, eps, qkv.stride(0),
            kv.k.stride(0), kv.k.stride(1), kv.v.stride(0), kv.v.stride(1),
            HEADS=heads, KV_HEADS=kv_heads, D=dim, DIM=power(dim), NORM=norms is not None,
            WIDE=q_weight.dtype == torch.float32, num_warps=1,
        )  # fmt: skip
    return q


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up [N, I] of gate_up [N, 2 I], the gate's values first."""
    rows, both = gate_up.shape
    width = both // 2
    assert gate_up.stride(1) == 1 and both % 2 == 0
    out = torch.empty((rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        block = min(power(width), _BLOCK)
        programs.silu_mul[(rows, -(-width // block))](
            gate_up, out, gate_up.stride(0), WIDTH=width, BLOCK=block, num_warps=4
        )
    return out


def walk(batch: TreeBatch, chosen: Tensor, depth: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """path [B, depth], accepted, leaf and bonus [B] as `spec.verify.walk` has them.

    chosen: [M] token drawn at each node with logits, M >= 0.
    """
    rows, device = batch.rows, batch.tokens.device
    path = torch.empty((rows, depth), dtype=torch.int64, device=device)
    accepted, leaf, bonus = torch.empty((3, rows), dtype=torch.int64, device=device)
    held = chosen if len(chosen) else batch.tokens  # any address will do: nothing is read
    programs.walk_rows[(rows,)](
        batch.tokens, batch.parents, batch.given, batch.logit_of, batch.node_ptr, held, path,
        accepted, leaf, bonus, depth, BLOCK=_NODES, num_warps=1,
    )  # fmt: skip
    return path, accepted, leaf, bonus


def settle(
    batch: TreeBatch,
    path: Tensor,
    leaf: Tensor,
    next_slots: Tensor,
    table: Tensor,
    replayed: Tensor | None = None,
) -> None:
    """Write what became certain into the table: given nodes, the path, the slot behind it.

    next_slots: [B], 0 = none was granted. replayed: [N], 1 = the node's entry stays as it is. A
    place behind the last column is the last column, which swallows writes.
    """
    assert table.stride(1) == 1 and path.is_contiguous()
    programs.settle_rows[(batch.rows,)](
        batch.positions, batch.slots, batch.given, batch.node_ptr, batch.row_ids, path, leaf,
        next_slots, batch.given if replayed is None else replayed, table, table.stride(0),
        table.shape[1], path.shape[1], REPLAYS=replayed is not None, BLOCK=_NODES, num_warps=1,
    )  # fmt: skip
