"""Weights of a head in training under the names of its file: what all kinds of heads share.

Parameters are float32 and flat, because the file's names are not the paths of modules. The map that
joins the features is held divided by the usual size of each channel. Knows no equations.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn


class NamedWeights(nn.Module):
    """Matrices begin as zeros, norms as ones; `take` sets them. "fc" is one of the matrices."""

    def __init__(
        self, sizes: Mapping[str, tuple[int, int]], norms: Mapping[str, int], features: int
    ) -> None:
        """sizes: [outputs, inputs] of each matrix. norms: their widths. features: inputs of fc."""
        super().__init__()
        # Features differ in size from channel to channel by orders of magnitude, and a step of Adam
        # moves every weight alike: training sees them divided by `scale`, the file does not.
        self.scale: Tensor
        self.register_buffer("scale", torch.ones(features))
        # Flat names: the file's names are not the paths of modules.
        self.weights = nn.ParameterDict(
            {_key(name): nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
            | {_key(name): nn.Parameter(torch.ones(size)) for name, size in norms.items()}
        )

    def __getitem__(self, name: str) -> nn.Parameter:
        parameter = self.weights[_key(name)]
        assert isinstance(parameter, nn.Parameter)
        return parameter

    def named(self) -> dict[str, Tensor]:
        """Detached tensors under the names of the file."""
        named = {
            key.replace("/", ".") + ".weight": held.detach() for key, held in self.weights.items()
        }
        named["fc.weight"] = named["fc.weight"] / self.scale
        return named

    def take(self, tensors: Mapping[str, Tensor], scale: Tensor | None = None) -> None:
        """Set parameters from tensors under the names of the file. KeyError if one is missing.

        scale: [T * H] the usual size of each channel of the features.
        """
        with torch.no_grad():
            if scale is not None:
                self.scale.copy_(scale)
            for key, held in self.weights.items():
                given = tensors[key.replace("/", ".") + ".weight"]
                held.copy_(given * self.scale if key == "fc" else given)

    def others(self, *names: str) -> Iterable[nn.Parameter]:
        """All parameters but these."""
        left_out = {_key(name) for name in names}
        return [held for key, held in self.weights.items() if key not in left_out]


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """Rotary embedding in halves: x [N, heads, D] at `positions` [N]."""
    half = x.shape[-1] // 2
    step = torch.arange(half, device=x.device, dtype=torch.float32) / half
    angle = positions.float().unsqueeze(1) * theta**-step  # [N, D/2]
    cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
    low, high = x.float().chunk(2, -1)
    return torch.cat((low * cos - high * sin, high * cos + low * sin), -1)


def _key(name: str) -> str:
    return name.replace(".", "/")
