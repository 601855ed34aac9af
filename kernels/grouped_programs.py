# mypy: allow-untyped-decorators, allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton programs of grouped products: the rows that chose an expert times that expert's matrices.

Device code only: grouped_gemm.py sorts, allocates and launches. (token, choice) pairs are sorted by
expert; a program finds its expert from where each one's pairs begin, so how many rows an expert has
is never read back and a launch can be captured in a graph. Also runs in Triton's interpreter.
"""

import triton
import triton.language as tl


@triton.jit
def rows_of_block(starts, block, EXPERTS: tl.constexpr, WIDE: tl.constexpr, M: tl.constexpr):
    """The block's expert (EXPERTS = there is none), its rows [M] in sorted order, which exist."""
    e = tl.arange(0, WIDE)
    low = tl.load(starts + e, mask=e < EXPERTS, other=0)
    high = tl.load(starts + e + 1, mask=e < EXPERTS, other=0)
    blocks = (high - low + M - 1) // M
    ends = tl.cumsum(blocks, 0)
    expert = tl.minimum(tl.sum((ends <= block).to(tl.int32), 0), EXPERTS)
    before = tl.sum(tl.where(e < expert, blocks, 0), 0)
    known = expert < EXPERTS
    first = tl.load(starts + expert, mask=known, other=0) + (block - before) * M
    last = tl.load(starts + expert + 1, mask=known, other=0)
    rows = first + tl.arange(0, M)
    return expert, rows, rows < last


@triton.jit
def gate_up_tile(
    x, gate_up, out, order, starts, x_row, w_expert, w_row,
    MANY: tl.constexpr, EXPERTS: tl.constexpr, WIDE: tl.constexpr, HIDDEN: tl.constexpr,
    INNER: tl.constexpr, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr,
    PRECISION: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of M pairs in sorted order, N of the INNER columns: out [pairs, INNER]."""
    expert, rows, real = rows_of_block(starts, tl.program_id(0), EXPERTS, WIDE, M)
    if expert >= EXPERTS:
        return
    token = tl.load(order + rows, mask=real, other=0) // MANY
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = column < INNER
    factor: tl.constexpr = tl.float32 if WIDEN else x.dtype.element_ty
    gate = tl.zeros((M, N), tl.float32)
    up = tl.zeros((M, N), tl.float32)
    weight = gate_up + expert.to(tl.int64) * w_expert
    for at in range(0, HIDDEN, K):
        k = at + tl.arange(0, K)
        held = k < HIDDEN
        read = x + token[:, None] * x_row + k[None, :]
        given = tl.load(read, mask=real[:, None] & held[None, :], other=0.0).to(factor)
        mask = held[:, None] & inside[None, :]
        place = weight + column[None, :] * w_row + k[:, None]
        left = tl.load(place, mask=mask, other=0.0).to(factor)
        right = tl.load(place + INNER * w_row, mask=mask, other=0.0).to(factor)
        gate += tl.dot(given, left, input_precision=PRECISION)
        up += tl.dot(given, right, input_precision=PRECISION)
    made = gate / (1.0 + tl.exp(-gate)) * up
    where = out + rows[:, None].to(tl.int64) * INNER + column[None, :]
    tl.store(where, made.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])


@triton.jit
def down_tile(
    inner, down, weights, out, order, starts, w_expert, w_row,
    EXPERTS: tl.constexpr, WIDE: tl.constexpr, HIDDEN: tl.constexpr, INNER: tl.constexpr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, PRECISION: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Weighted rows of M pairs, N of the HIDDEN columns, each at its pair: out [pairs, HIDDEN]."""
    expert, rows, real = rows_of_block(starts, tl.program_id(0), EXPERTS, WIDE, M)
    if expert >= EXPERTS:
        return
    pair = tl.load(order + rows, mask=real, other=0)
    column = tl.program_id(1) * N + tl.arange(0, N)
    inside = column < HIDDEN
    factor: tl.constexpr = tl.float32 if WIDEN else inner.dtype.element_ty
    total = tl.zeros((M, N), tl.float32)
    weight = down + expert.to(tl.int64) * w_expert
    for at in range(0, INNER, K):
        k = at + tl.arange(0, K)
        held = k < INNER
        read = inner + rows[:, None].to(tl.int64) * INNER + k[None, :]
        given = tl.load(read, mask=real[:, None] & held[None, :], other=0.0).to(factor)
        place = weight + column[None, :] * w_row + k[:, None]
        matrix = tl.load(place, mask=held[:, None] & inside[None, :], other=0.0).to(factor)
        total += tl.dot(given, matrix, input_precision=PRECISION)
    total *= tl.load(weights + pair, mask=real, other=0.0)[:, None]
    where = out + pair[:, None] * HIDDEN + column[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=real[:, None] & inside[None, :])
