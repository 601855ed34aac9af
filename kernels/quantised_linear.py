"""Linear maps over matrices held as codes, in Triton: tiles, splits and launches.

Up to `MANY` rows are multiplied by the codes as they lie in memory; how the inputs are split, and
the order in which sums are added, follow from the matrix alone, so a row's bits are the same alone
and among any others. More rows are worth a plain copy of the matrix, made for the moment. Specified
by `Codes.linear`. Knows matrices; no layers or formats.
"""

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from spec_serve.kernels import quantised_linear_programs as programs
from spec_serve.kernels.quantised import Codes

TILE = int(programs.TILE)
# Rows beyond which the matrix is made plain: reading it twice is then less than multiplying.
MANY = 256
# Outputs of a program.
WIDTH = 64
# Programs per multiprocessor that inputs are split for, and pieces that a split has at least.
WAVES = 2
LEAST = 4
MOST_SPLITS = 16


def fits(codes: Codes) -> bool:
    """Whether the programs take a matrix: groups must not be too short for matrix products."""
    return codes.piece >= (2 * TILE if codes.kind == "int4" else TILE)


class QuantisedProduct:
    """y = x W^T + b on one device.

    processors: multiprocessors of the device. splits: into how many parts the inputs are cut, 0 =
    as many as fill the device.
    """

    def __init__(self, codes: Codes, processors: int, splits: int = 0) -> None:
        assert fits(codes)
        self._codes = codes
        pieces = -(-codes.inputs // codes.piece)
        if not splits:
            programs_of_outputs = -(-codes.outputs // WIDTH)
            wanted = -(-WAVES * processors // programs_of_outputs)
            splits = min(wanted, pieces // LEAST, MOST_SPLITS)
        self._share = -(-pieces // max(splits, 1))  # pieces of a split
        self._splits = -(-pieces // self._share)

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: [N, in] -> [N, out]; bias: [out]."""
        codes = self._codes
        rows = x.shape[0]
        assert x.shape[1] == codes.inputs
        if rows > MANY:
            return F.linear(x, self.plain(x.dtype), bias)
        out = torch.empty((rows, codes.outputs), dtype=x.dtype, device=x.device)
        if not rows:
            return out
        if x.stride(1) != 1:
            x = x.contiguous()
        part = out
        if self._splits > 1:
            shape = (self._splits, rows, codes.outputs)
            part = torch.empty(shape, dtype=torch.float32, device=x.device)
        tiles = 1 if rows <= TILE else 2 if rows <= 2 * TILE else 4
        groups = codes.scale.shape[1]
        grid = (triton.cdiv(codes.outputs, WIDTH), self._splits, triton.cdiv(rows, tiles * TILE))
        programs.multiply[grid](
            x, codes.codes, codes.scale, _or(codes.zero, out), _or(codes.order, out),
            _or(bias, out), out, part,
            rows, codes.inputs, codes.outputs, x.stride(0), codes.codes.stride(0), groups,
            codes.group, self._share,
            KIND=codes.kind, OFFSET=codes.offset, ZEROS=codes.zero is not None,
            ORDERED=codes.order is not None, GROUPED=groups > 1, BIASED=bias is not None,
            PAD=codes.inputs % codes.piece != 0, PIECE=codes.piece, WIDTH=WIDTH, TILES=tiles,
            SPLITS=self._splits, PRECISION="ieee" if x.dtype == torch.float32 else "tf32",
            WIDEN=x.device.type == "cpu", num_warps=4, num_stages=4,
        )  # fmt: skip
        if self._splits > 1:
            block = 256
            programs.add_splits[(triton.cdiv(codes.outputs, block), rows)](
                out, part, _or(bias, out), rows, codes.outputs, SPLITS=self._splits,
                BIASED=bias is not None, BLOCK=block, num_warps=2,
            )  # fmt: skip
        return out

    def plain(self, dtype: torch.dtype) -> Tensor:
        """W [out, in] in the order of the inputs, in `dtype`."""
        codes = self._codes
        out = torch.empty((codes.outputs, codes.inputs), dtype=dtype, device=codes.codes.device)
        grid = (triton.cdiv(codes.outputs, WIDTH), triton.cdiv(codes.inputs, codes.piece))
        programs.expand[grid](
            codes.codes, codes.scale, _or(codes.zero, out), _or(codes.order, out), out,
            codes.inputs, codes.outputs, codes.codes.stride(0), codes.scale.shape[1], codes.group,
            KIND=codes.kind, OFFSET=codes.offset, ZEROS=codes.zero is not None,
            ORDERED=codes.order is not None, PIECE=codes.piece, WIDTH=WIDTH, num_warps=4,
        )  # fmt: skip
        return out


def _or(part: Tensor | None, other: Tensor) -> Tensor:
    """Programs take a pointer where they read none."""
    return other if part is None else part
