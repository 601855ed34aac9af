"""Grouped products in Triton: all experts of a layer in two launches, however rows fall on them.

Equals kernels/grouped.py's torch but for rounding. Nothing is read back from the device: pairs are
sorted there, and there are as many programs as any spread of them can need. Knows tensors only.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.kernels import grouped_programs as programs
from spec_serve.kernels.grouped import Activation, torch_grouped

FEW, MANY = 16, 64
"""Rows of a program: few where experts get few, as padding is computed too."""

COLUMNS, DEPTH = 64, 64


def triton_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, act: Activation
) -> Tensor:
    """See `kernels.grouped.Grouped`. Other gates than SiLU are left to torch."""
    if act is not F.silu:
        return torch_grouped(x, gate_up, down, weights, chosen, act)
    nodes, many = chosen.shape
    experts, hidden, inner = down.shape
    pairs = nodes * many
    if not pairs:
        return torch.empty_like(x)
    assert x.stride(1) == gate_up.stride(2) == down.stride(2) == 1
    ranked, order = torch.sort(chosen.reshape(-1), stable=True)
    bounds = torch.arange(experts + 1, device=x.device)
    starts = torch.searchsorted(ranked, bounds)  # [E + 1]
    rows = FEW if pairs <= FEW * experts else MANY
    blocks = min(pairs, pairs // rows + experts)
    wide = 1 << (experts - 1).bit_length() if experts > 1 else 2
    precision = "ieee" if x.dtype == torch.float32 else "tf32"
    widen = x.device.type == "cpu"  # the interpreter knows no products of bfloat16
    between = torch.empty((pairs, inner), dtype=x.dtype, device=x.device)
    programs.gate_up_tile[(blocks, -(-inner // COLUMNS))](
        x, gate_up, between, order, starts, x.stride(0), gate_up.stride(0), gate_up.stride(1),
        MANY=many, EXPERTS=experts, WIDE=wide, HIDDEN=hidden, INNER=inner, M=rows, N=COLUMNS,
        K=DEPTH, PRECISION=precision, WIDEN=widen,
    )  # fmt: skip
    out = torch.empty((pairs, hidden), dtype=x.dtype, device=x.device)
    programs.down_tile[(blocks, -(-hidden // COLUMNS))](
        between, down, weights.reshape(-1), out, order, starts, down.stride(0), down.stride(1),
        EXPERTS=experts, WIDE=wide, HIDDEN=hidden, INNER=inner, M=rows, N=COLUMNS, K=DEPTH,
        PRECISION=precision, WIDEN=widen,
    )  # fmt: skip
    return out.view(nodes, many, hidden).sum(1)
