"""Rotary position embedding: inverse frequencies per kind, cos and sin for given positions.

The half-split layout: channel i is paired with channel i + D/2. Knows nothing of layers; a forward
asks once per kind of layer and hands the result to every layer.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from spec_serve.target.config import RopeConfig

Rotation = tuple[Tensor, Tensor]
"""cos and signed sin, [N, 1, D] each; the first half of sin carries the minus of the rotation."""


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> Tensor:
    """Radians per position of each channel pair, [D/2] float32.

    linear: position interpolation, Chen et al. 2023 (arXiv 2306.15595). yarn: Peng et al. 2023
    (arXiv 2309.00071), section 3.2. llama3: wavelengths beyond original_context / low_freq_factor
    are stretched by `factor`, those below original_context / high_freq_factor are kept, and
    between the two the frequencies are mixed linearly in 1 / wavelength.
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    freq = 1.0 / rope.theta**exponent  # [D/2]
    if rope.kind == "linear":
        return freq / rope.factor
    if rope.kind == "freqs":
        return freq / torch.tensor(rope.divisors, dtype=torch.float32)
    if rope.kind == "llama3":
        turns = rope.original_context * freq / (2 * math.pi)
        keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        keep = keep.clamp(0, 1)
        return keep * freq + (1 - keep) * freq / rope.factor
    if rope.kind == "yarn":
        low, high = (
            head_dim
            * math.log(rope.original_context / (turns * 2 * math.pi))
            / (2 * math.log(rope.theta))
            for turns in (rope.beta_fast, rope.beta_slow)
        )
        if rope.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, head_dim - 1)
        if low == high:
            high += 0.001
        ramp = (torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)
        keep = 1 - ramp.clamp(0, 1)
        return keep * freq + (1 - keep) * freq / rope.factor
    assert rope.kind == "default", rope.kind
    return freq


class Rotary:
    """cos and sin of one RopeConfig on one device."""

    def __init__(
        self, rope: RopeConfig, head_dim: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        half = inverse_frequencies(rope, head_dim).to(device)
        self._frequencies = torch.cat((half, half))  # [D]
        self._factor = rope.attention_factor
        sign = torch.ones(head_dim, device=device)
        sign[: head_dim // 2] = -1
        self._signed_factor = sign * rope.attention_factor  # [D]
        self._dtype = dtype

    def at(self, positions: Tensor) -> Rotation:
        """Rotation for positions [N]; angles in float32, the result in the model's dtype."""
        angles = (positions.to(torch.float32)[:, None] * self._frequencies)[:, None]  # [N, 1, D]
        cos, sin = angles.cos(), angles.sin().mul_(self._signed_factor)
        if self._factor != 1.0:
            cos.mul_(self._factor)
        return cos.to(self._dtype), sin.to(self._dtype)


def rotate(x: Tensor, rotation: Rotation) -> Tensor:
    """Rotate heads x [N, heads, D]."""
    cos, sin = rotation
    return torch.addcmul(x * cos, torch.roll(x, x.shape[-1] // 2, -1), sin)
