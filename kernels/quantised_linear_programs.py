# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton programs for matrices held as codes: a product, its splits' sum, and a plain copy.

Device code only; quantised_linear.py launches it. Rows are taken in tiles of sixteen that meet a
piece of the matrix together, each in a product of its own, and sums are taken piece by piece: the
bits of a row depend on the matrix's shape alone. Weights are never rounded: products are taken of
whole numbers (or float8 values), which half precision holds exactly, and scaled in float32.
"""

import triton
import triton.language as tl

TILE = tl.constexpr(16)


@triton.jit
def numbers(raw, zero, KIND: tl.constexpr, dtype: tl.constexpr):
    """Codes as they come from memory -> code - zero, or the float8 value, as `dtype`."""
    if KIND == "fp8":
        # Sign, exponent and mantissa at their places in a float16, whose bias is larger by eight.
        wide = raw.to(tl.int16)
        bits = ((wide & 0x80) << 8) | ((wide & 0x7F) << 7)
        return (bits.to(tl.float16, bitcast=True).to(tl.float32) * 256.0).to(dtype)
    return (raw.to(tl.int16) - zero).to(tl.float32).to(dtype)


@triton.jit
def row_tile(x, m, real, k, rows, x_row, PAD: tl.constexpr):
    """x[m, k], zeros behind the last row and input. # [TILE, K]"""
    mask = (m < rows)[:, None]
    if PAD:
        mask = mask & real[None, :]
    return tl.load(x + m.to(tl.int64)[:, None] * x_row + k[None, :], mask=mask, other=0.0)


@triton.jit
def product(
    acc, x, order, w, m, k, real, scale, rows, x_row,
    PAD: tl.constexpr, ORDERED: tl.constexpr, GROUPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + x[m, k] @ w, scaled if every group has a scale of its own."""
    if ORDERED:
        k = tl.load(order + k, mask=real, other=0)
    a = row_tile(x, m, real, k, rows, x_row, PAD).to(w.dtype)
    if GROUPED:
        return acc + tl.dot(a, w, input_precision=PRECISION) * scale[None, :]
    return tl.dot(a, w, acc, input_precision=PRECISION)


@triton.jit
def leave(
    out, part, bias, acc, m, n, split, rows, outputs,
    SPLITS: tl.constexpr, BIASED: tl.constexpr,
):  # fmt: skip
    """A tile's sums: to `out` if they are whole, to their place in `part` otherwise."""
    mask = (m < rows)[:, None] & (n < outputs)[None, :]
    at = m.to(tl.int64)[:, None] * outputs + n[None, :]
    if SPLITS == 1:
        if BIASED:
            acc += tl.load(bias + n, mask=n < outputs, other=0.0).to(tl.float32)[None, :]
        tl.store(out + at, acc.to(out.dtype.element_ty), mask=mask)
    else:
        tl.store(part + split.to(tl.int64) * rows * outputs + at, acc, mask=mask)


@triton.jit(do_not_specialize=["rows"])
def multiply(
    x, codes, scale, zero, order, bias, out, part,
    rows, inputs, outputs, x_row, code_row, groups, group, share,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    GROUPED: tl.constexpr, BIASED: tl.constexpr, PAD: tl.constexpr, PIECE: tl.constexpr,
    WIDTH: tl.constexpr, TILES: tl.constexpr, SPLITS: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """WIDTH outputs of TILES tiles of rows over one split of `share` pieces of inputs."""
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    split = tl.program_id(1)
    m = tl.program_id(2) * TILES * TILE + tl.arange(0, TILE)
    inside = n < outputs
    line = n.to(tl.int64)
    dtype: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    HALF: tl.constexpr = PIECE // 2 if KIND == "int4" else PIECE
    acc0 = tl.zeros((TILE, WIDTH), tl.float32)
    acc1 = tl.zeros((TILE, WIDTH), tl.float32)
    acc2 = tl.zeros((TILE, WIDTH), tl.float32)
    acc3 = tl.zeros((TILE, WIDTH), tl.float32)
    pieces = (inputs + PIECE - 1) // PIECE
    first = split * share
    last = tl.minimum(first + share, pieces)
    j = tl.arange(0, HALF)
    factor = tl.full((WIDTH,), 1.0, tl.float32)
    none = tl.full((WIDTH,), OFFSET, tl.int16)
    if not GROUPED:
        factor = tl.load(scale + line, mask=inside, other=0.0).to(tl.float32)
        if ZEROS:
            none = tl.load(zero + line, mask=inside, other=0).to(tl.int16)
    for piece in range(first, last):
        k = piece * PIECE + j
        if GROUPED:
            at = line * groups + piece * PIECE // group
            factor = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
            if ZEROS:
                none = tl.load(zero + at, mask=inside, other=0).to(tl.int16)
        real = k < inputs
        where = codes + line[None, :] * code_row + (piece * HALF + j)[:, None]
        held = inside[None, :]
        if PAD:
            held = held & real[:, None]
        raw = tl.load(where, mask=held, other=0)  # [HALF, WIDTH]
        for half in tl.static_range(2 if KIND == "int4" else 1):
            part_of = raw
            if KIND == "int4":
                part_of = (raw >> 4) if half == 1 else (raw & 15)
            w = numbers(part_of, none[None, :], KIND, dtype)
            at_k = k + half * HALF
            acc0 = product(acc0, x, order, w, m, at_k, real, factor, rows, x_row,
                           PAD, ORDERED, GROUPED, PRECISION)  # fmt: skip
            if TILES > 1:
                acc1 = product(acc1, x, order, w, m + TILE, at_k, real, factor, rows, x_row,
                               PAD, ORDERED, GROUPED, PRECISION)  # fmt: skip
            if TILES > 2:
                acc2 = product(acc2, x, order, w, m + 2 * TILE, at_k, real, factor, rows, x_row,
                               PAD, ORDERED, GROUPED, PRECISION)  # fmt: skip
                acc3 = product(acc3, x, order, w, m + 3 * TILE, at_k, real, factor, rows, x_row,
                               PAD, ORDERED, GROUPED, PRECISION)  # fmt: skip
    if not GROUPED:
        acc0, acc1 = acc0 * factor[None, :], acc1 * factor[None, :]
        acc2, acc3 = acc2 * factor[None, :], acc3 * factor[None, :]
    leave(out, part, bias, acc0, m, n, split, rows, outputs, SPLITS, BIASED)
    if TILES > 1:
        leave(out, part, bias, acc1, m + TILE, n, split, rows, outputs, SPLITS, BIASED)
    if TILES > 2:
        leave(out, part, bias, acc2, m + 2 * TILE, n, split, rows, outputs, SPLITS, BIASED)
        leave(out, part, bias, acc3, m + 3 * TILE, n, split, rows, outputs, SPLITS, BIASED)


@triton.jit(do_not_specialize=["rows"])
def add_splits(
    out, part, bias, rows, outputs,
    SPLITS: tl.constexpr, BIASED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """BLOCK outputs of one row: the splits' sums, first to last."""
    row = tl.program_id(1).to(tl.int64)
    n = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = n < outputs
    total = tl.zeros((BLOCK,), tl.float32)
    for split in range(SPLITS):
        total += tl.load(part + (split * rows + row) * outputs + n, mask=mask, other=0.0)
    if BIASED:
        total += tl.load(bias + n, mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * outputs + n, total.to(out.dtype.element_ty), mask=mask)


@triton.jit
def expand(
    codes, scale, zero, order, out, inputs, outputs, code_row, groups, group,
    KIND: tl.constexpr, OFFSET: tl.constexpr, ZEROS: tl.constexpr, ORDERED: tl.constexpr,
    PIECE: tl.constexpr, WIDTH: tl.constexpr,
):  # fmt: skip
    """WIDTH outputs by PIECE inputs of the plain matrix, each weight rounded once."""
    n = tl.program_id(0) * WIDTH + tl.arange(0, WIDTH)
    piece = tl.program_id(1)
    inside = n < outputs
    line = n.to(tl.int64)
    HALF: tl.constexpr = PIECE // 2 if KIND == "int4" else PIECE
    j = tl.arange(0, HALF)
    at = line * groups + piece * PIECE // group
    factor = tl.load(scale + at, mask=inside, other=0.0).to(tl.float32)
    none = tl.full((WIDTH,), OFFSET, tl.int16)
    if ZEROS:
        none = tl.load(zero + at, mask=inside, other=0).to(tl.int16)
    held = inside[:, None] & (piece * PIECE + j < inputs)[None, :]
    where = codes + line[:, None] * code_row + (piece * HALF + j)[None, :]
    raw = tl.load(where, mask=held, other=0)
    for half in tl.static_range(2 if KIND == "int4" else 1):
        part_of = raw
        if KIND == "int4":
            part_of = (raw >> 4) if half == 1 else (raw & 15)
        w = numbers(part_of, none[:, None], KIND, tl.float32) * factor[:, None]
        k = piece * PIECE + j + half * HALF
        real = k < inputs
        if ORDERED:
            k = tl.load(order + k, mask=real, other=0)
        mask = inside[:, None] & real[None, :]
        tl.store(out + line[:, None] * inputs + k[None, :], w.to(out.dtype.element_ty), mask=mask)
