"""Matrices held as codes: the one form in which kernels see every quantised checkpoint.

A weight is (code - zero) * scale, with a scale, and perhaps a zero, for every run of inputs of an
output. Codes of four bits lie two to a byte. `weight` and `linear` in torch are the specification
of kernels/quantised_linear.py. Knows no file formats (target/quantised.py) and no layers.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

KINDS = ("int4", "int8", "fp8")
LONGEST = 128
"""Inputs that a program works on at a time, at most; four-bit codes are packed in such pieces."""


@dataclass(frozen=True, slots=True)
class Codes:
    """W [out, in] as codes.

    kind: int4 (two codes to a byte, see `pack`), int8 (unsigned), fp8 (bits of float8 e4m3).
    codes: [out, in] or [out, in / 2] uint8. scale: [out, groups] floating. zero: [out, groups]
    uint8, None = `offset` everywhere. group: inputs to a scale. order: [in], the input that each
    column of codes belongs to; None = as they are.
    """

    kind: str
    codes: Tensor
    scale: Tensor
    group: int
    inputs: int
    zero: Tensor | None = None
    offset: int = 0
    order: Tensor | None = None

    def __post_init__(self) -> None:
        assert self.kind in KINDS and self.codes.dtype == torch.uint8, self.kind
        width = self.inputs // 2 if self.kind == "int4" else self.inputs
        groups = -(-self.inputs // self.group)
        assert self.codes.shape == (self.outputs, width), self.codes.shape
        assert self.scale.shape == (self.outputs, groups), self.scale.shape
        assert self.zero is None or self.zero.shape == self.scale.shape
        assert self.kind != "int4" or self.inputs % self.piece == 0

    @property
    def outputs(self) -> int:
        """Rows of W."""
        return self.codes.shape[0]

    @property
    def piece(self) -> int:
        """Consecutive inputs that share a scale and are worked on together: a power of two."""
        return piece_of(self.group, self.inputs)

    @property
    def nbytes(self) -> int:
        """Bytes held."""
        parts = (self.codes, self.scale, self.zero, self.order)
        return sum(part.numel() * part.element_size() for part in parts if part is not None)

    def to(self, device: torch.device | str) -> Codes:
        """The same on another device."""

        def moved(part: Tensor | None) -> Tensor | None:
            return None if part is None else part.to(device)

        return replace(
            self,
            codes=self.codes.to(device),
            scale=self.scale.to(device),
            zero=moved(self.zero),
            order=moved(self.order),
        )

    def whole_numbers(self) -> Tensor:
        """(code - zero) of every weight, in the order of the columns. # [out, in] float32"""
        if self.kind == "fp8":
            return self.codes.view(torch.float8_e4m3fn).float()
        codes = unpack(self.codes, self.piece) if self.kind == "int4" else self.codes
        if self.zero is None:
            return codes.float() - self.offset
        return codes.float() - self._spread(self.zero.float())

    def weight(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """W [out, in] with its inputs in order; multiplied in float32, then rounded to `dtype`."""
        found = (self.whole_numbers() * self._spread(self.scale.float())).to(dtype)
        if self.order is None:
            return found
        out = torch.empty_like(found)
        out[:, self.order] = found
        return out

    def linear(self, x: Tensor) -> Tensor:
        """x [N, in] times W transposed, [N, out]: what the kernels compute, in plain torch."""
        return F.linear(x.float(), self.weight()).to(x.dtype)

    def _spread(self, values: Tensor) -> Tensor:
        """[out, groups] -> [out, in]"""
        return values.repeat_interleave(self.group, 1)[:, : self.inputs]


def piece_of(group: int, inputs: int) -> int:
    """See `Codes.piece`. A scale for all inputs leaves the choice; zeros are then read behind
    them, save for four-bit codes, whose pieces must be whole."""
    length = LONGEST
    if group >= inputs:
        while inputs % length and length > 32:
            length //= 2
        return length
    while group % length:
        length //= 2
    return length


def pack(codes: Tensor, piece: int) -> Tensor:
    """Codes below 16, [out, in] -> [out, in / 2]: in each piece byte j holds code j in its low half
    and code j + piece / 2 in its high half, so that both halves meet consecutive inputs."""
    low, high = codes.view(len(codes), -1, 2, piece // 2).unbind(2)  # [out, pieces, piece / 2]
    return (low | high << 4).flatten(1)


def unpack(packed: Tensor, piece: int) -> Tensor:
    """What `pack` packed: [out, in / 2] -> [out, in] uint8."""
    halves = packed.view(len(packed), -1, 1, piece // 2)
    return torch.cat((halves & 15, halves >> 4), 2).flatten(1)


def stacked(parts: list[Codes]) -> list[Codes]:
    """Matrices one below the other, those that can be held as one joined."""
    out: list[Codes] = []
    for part in parts:
        if out and _alike(out[-1], part):
            out[-1] = _joined(out[-1], part)
        else:
            out.append(part)
    return out


def _alike(a: Codes, b: Codes) -> bool:
    if (a.kind, a.group, a.inputs, a.offset) != (b.kind, b.group, b.inputs, b.offset):
        return False
    if (a.zero is None) != (b.zero is None) or (a.order is None) != (b.order is None):
        return False
    return a.order is None or b.order is None or torch.equal(a.order, b.order)


def _joined(a: Codes, b: Codes) -> Codes:
    dtype = a.scale.dtype if a.scale.dtype == b.scale.dtype else torch.float32
    zero = None
    if a.zero is not None and b.zero is not None:
        zero = torch.cat((a.zero, b.zero))
    return replace(
        a,
        codes=torch.cat((a.codes, b.codes)),
        scale=torch.cat((a.scale.to(dtype), b.scale.to(dtype))),
        zero=zero,
    )
