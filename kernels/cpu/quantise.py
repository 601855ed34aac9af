"""Plain weights into ggml's simple quantisations, block by block of 32, as ggml's own tools round.

Sources: the formats are described in the gguf package's documentation; the results equal its
`quants.quantize` bit for bit (tests/kernels/test_quantise.py).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

BLOCK = 32
PIECE = 1 << 20  # weights at a time


def _bytes(values: Tensor) -> Tensor:
    """[B] or [B, n] of any type -> [B, bytes]."""
    return values.contiguous().view(torch.uint8).view(len(values), -1)


def _inverse(d: Tensor) -> Tensor:
    return torch.where(d == 0, torch.zeros_like(d), 1 / d)


def _nibbles(q: Tensor) -> Tensor:
    """Codes [B, 32] below 16 -> [B, 16], the first half in the low bits."""
    return q[:, :16] | q[:, 16:] << 4


def _peak(x: Tensor) -> Tensor:
    """The value of largest size in each block, with its sign, [B, 1]."""
    return x.gather(1, x.abs().argmax(1, keepdim=True))


def _q4_0(x: Tensor) -> Tensor:
    d = _peak(x) / -8
    q = (x * _inverse(d) + 8.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((_bytes(d.half()), _nibbles(q)), 1)


def _q4_1(x: Tensor) -> Tensor:
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    d = (high - low) / 15
    q = ((x - low) * _inverse(d) + 0.5).trunc().clamp(0, 15).to(torch.uint8)
    return torch.cat((_bytes(d.half()), _bytes(low.half()), _nibbles(q)), 1)


def _q5_0(x: Tensor) -> Tensor:
    d = _peak(x) / -16
    q = (x * _inverse(d) + 16.5).trunc().clamp(0, 31).to(torch.uint8)
    return torch.cat((_bytes(d.half()), _fifth(q), _nibbles(q & 15)), 1)


def _q5_1(x: Tensor) -> Tensor:
    low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    d = (high - low) / 31
    q = ((x - low) * _inverse(d) + 0.5).trunc().clamp(0, 31).to(torch.uint8)
    return torch.cat((_bytes(d.half()), _bytes(low.half()), _fifth(q), _nibbles(q & 15)), 1)


def _fifth(q: Tensor) -> Tensor:
    """The fifth bits of 32 codes in four bytes, the first code's lowest."""
    bits = (q >> 4).view(len(q), 4, 8)
    return (bits << torch.arange(8, dtype=torch.uint8)).sum(2).to(torch.uint8)


def _q8_0(x: Tensor) -> Tensor:
    d = x.abs().amax(1, keepdim=True) / 127
    scaled = x * _inverse(d)
    # Halves away from zero, as C's roundf.
    q = (scaled.abs() + 0.5).floor().mul(scaled.sign()).to(torch.int8)
    return torch.cat((_bytes(d.half()), q.view(torch.uint8)), 1)


def _by_pieces(quantise: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    def whole(weight: Tensor) -> Tensor:
        blocks = weight.float().reshape(-1, BLOCK)
        step = PIECE // BLOCK
        parts = [blocks[at : at + step] for at in range(0, len(blocks), step)]
        return torch.cat([quantise(part).view(-1) for part in parts])

    return whole


QUANTISERS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _by_pieces(_q4_0),
    "Q4_1": _by_pieces(_q4_1),
    "Q5_0": _by_pieces(_q5_0),
    "Q5_1": _by_pieces(_q5_1),
    "Q8_0": _by_pieces(_q8_0),
}
"""[outputs, inputs] -> the bytes of its rows' blocks, uint8."""
