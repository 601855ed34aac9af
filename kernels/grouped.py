"""Tokens through the experts that were chosen for them: torch, the specification, and the choice.

Rows that go to the same expert run together; what a token's experts give is weighted and added in
the order in which they were chosen. Knows tensors; how experts are chosen is target/experts.py's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

Activation = Callable[[Tensor], Tensor]


class Grouped(Protocol):
    """Gated MLPs, each over the rows that chose it."""

    def __call__(
        self,
        x: Tensor,  # [N, H]
        gate_up: Tensor,  # [E, 2I, H], the gate's rows first
        down: Tensor,  # [E, H, I]
        weights: Tensor,  # [N, k] float32
        chosen: Tensor,  # [N, k] int64
        act: Activation,
    ) -> Tensor:
        """The weighted sum of what each token's experts give, [N, H]."""
        ...


def gathered(
    x: Tensor, chosen: Tensor, experts: int, run: Callable[[int, Tensor], Tensor]
) -> Tensor:
    """[N, k, H]: what each of its experts gives for a token. run: (expert, rows) -> rows.

    Waits for the device to learn how many rows each expert has.
    """
    nodes, many = chosen.shape
    order = chosen.flatten().argsort(stable=True)
    counts = torch.bincount(chosen.flatten(), minlength=experts).tolist()
    out = x.new_empty(nodes * many, x.shape[1])
    start = 0
    for expert, count in enumerate(counts):
        if count:
            places = order[start : start + count]
            out[places] = run(expert, x[places // many])
            start += count
    return out.view(nodes, many, -1)


def mixed(made: Tensor, weights: Tensor) -> Tensor:
    """made [N, k, H], weights [N, k] float32 -> [N, H] in made's dtype, summed in float32.

    One after the other, and product apart from sum: so no bit depends on N.
    """
    total = made[:, 0].float() * weights[:, :1]
    for j in range(1, made.shape[1]):
        total += made[:, j].float() * weights[:, j : j + 1]
    return total.to(made.dtype)


def torch_grouped(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, chosen: Tensor, act: Activation
) -> Tensor:
    """`Grouped` in torch, on any device."""

    def run(expert: int, rows: Tensor) -> Tensor:
        gate, up = F.linear(rows, gate_up[expert]).chunk(2, -1)
        return F.linear(act(gate) * up, down[expert])

    return mixed(gathered(x, chosen, len(gate_up), run), weights)


def pick_grouped(device: torch.device) -> Grouped:
    """Triton's on an NVIDIA GPU where it is installed, else torch's."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is not None:
        from spec_serve.kernels.grouped_gemm import triton_grouped

        return triton_grouped
    return torch_grouped
