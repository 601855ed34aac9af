"""Decoding of quantised tensors: ggml blocks to floating point, in plain torch.

`decode` walks a tensor's bytes in pieces of bounded size, expands each in float32 and writes it
straight into the destination's dtype, so a load needs little more memory than the weights it
leaves behind. Knows the block layouts; not files, names or architectures. The results equal
`gguf.quants.dequantize` bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spec_serve.target.gguf import GGML_TYPES

PIECE = 1 << 15
"""Weights decoded at a time. Up to this size torch runs an operation on the calling thread; beyond
it a dozen short operations per piece would each wait for all threads, which on a busy machine makes
loading tens of times slower."""

PLAIN = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
}
"""Types without blocks; ggml and safetensors call them alike."""


def block_of(kind: str) -> tuple[int, int]:
    """(weights, bytes) of the smallest whole piece of a type."""
    if kind in PLAIN:
        return 1, PLAIN[kind].itemsize
    return _SIZES[kind][1], _SIZES[kind][2]


def decode(data: Tensor, kind: str, out: Tensor) -> None:
    """Decode `data` [nbytes] uint8 of type `kind`, whole blocks, into `out` [elements].

    out: one-dimensional, contiguous, of any dtype (floating for types with blocks). Raises KeyError
    for a type that is neither in PLAIN nor in SUPPORTED.
    """
    if kind in PLAIN:
        out.copy_(data.view(PLAIN[kind]))
        return
    expand = _BLOCKS[kind]
    _, weights, nbytes = _SIZES[kind]
    blocks = data.view(-1, nbytes)  # [B, bytes]
    rows = out.view(-1, weights)  # [B, weights]
    assert len(blocks) == len(rows)
    step = PIECE // weights
    for first in range(0, len(blocks), step):
        rows[first : first + step] = expand(blocks[first : first + step])


def _half(block: Tensor, at: int) -> Tensor:
    """The float16 at byte `at` of every block: [B, bytes] -> [B, 1] float32."""
    return block[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """[..., n] bytes -> [..., 2n]: all low halves, then all high halves."""
    return torch.cat([packed & 15, packed >> 4], -1)


def _fifth_bits(block: Tensor, at: int) -> Tensor:
    """Bits 0..31 of the four bytes at `at`, already at their place value 16: [B, 32]."""
    bits = block[:, at : at + 4, None] >> torch.arange(8, dtype=torch.uint8)  # [B, 4, 8]
    return ((bits & 1) << 4).flatten(1)


def _q4_0(block: Tensor) -> Tensor:
    return _half(block, 0) * (_nibbles(block[:, 2:]).to(torch.int8) - 8)


def _q4_1(block: Tensor) -> Tensor:
    return _half(block, 0) * _nibbles(block[:, 4:]) + _half(block, 2)


def _q5_0(block: Tensor) -> Tensor:
    q = _nibbles(block[:, 6:]) | _fifth_bits(block, 2)
    return _half(block, 0) * (q.to(torch.int8) - 16)


def _q5_1(block: Tensor) -> Tensor:
    q = _nibbles(block[:, 8:]) | _fifth_bits(block, 4)
    return _half(block, 0) * q + _half(block, 2)


def _q8_0(block: Tensor) -> Tensor:
    return _half(block, 0) * block[:, 2:].contiguous().view(torch.int8)


def _scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Twelve bytes -> the 6-bit scales and minima of eight sub-blocks: [B, 12] -> two [B, 8]."""
    low, mid, high = packed[:, :4], packed[:, 4:8], packed[:, 8:]
    scales = torch.cat([low & 63, (high & 15) | ((low >> 6) << 4)], -1)
    minima = torch.cat([mid & 63, (high >> 4) | ((mid >> 6) << 4)], -1)
    return scales, minima


def _scaled(block: Tensor, q: Tensor) -> Tensor:
    """Q4_K and Q5_K: q [B, 8, 32] times its sub-block's scale, less its minimum."""
    scales, minima = _scales(block[:, 4:16])
    scale = (_half(block, 0) * scales)[..., None]  # [B, 8, 1]
    minimum = (_half(block, 2) * minima)[..., None]
    return (scale * q).sub_(minimum).flatten(1)


def _q4_k(block: Tensor) -> Tensor:
    return _scaled(block, _nibbles(block[:, 16:].view(-1, 4, 32)).view(-1, 8, 32))


def _q5_k(block: Tensor) -> Tensor:
    q = _nibbles(block[:, 48:].view(-1, 4, 32)).view(-1, 8, 32)
    sub_block = torch.arange(8, dtype=torch.uint8)[:, None]
    bits = (block[:, None, 16:48] >> sub_block) & 1  # [B, 8, 32]
    return _scaled(block, q | (bits << 4))


def _q6_k(block: Tensor) -> Tensor:
    low = _nibbles(block[:, :128].view(-1, 2, 64)).view(-1, 2, 4, 32)
    shift = torch.tensor([0, 2, 4, 6], dtype=torch.uint8)[:, None]
    high = (block[:, 128:192].view(-1, 2, 1, 32) >> shift) & 3  # [B, 2, 4, 32]
    q = (low | (high << 4)).to(torch.int8) - 32
    scale = _half(block, 208) * block[:, 192:208].contiguous().view(torch.int8)  # [B, 16]
    return (scale[..., None] * q.view(-1, 16, 16)).flatten(1)


_BLOCKS: dict[str, Callable[[Tensor], Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}
_SIZES = {row[0]: row for row in GGML_TYPES.values()}
SUPPORTED = ("F32", "F16", "BF16", *_BLOCKS)
"""The ggml types weights may have."""
