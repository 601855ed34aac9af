"""Float32 attention on CPUs whose sums are taken in an order that only the token's own past fixes.

Every sum runs key by key in path order inside blocks of `BLOCK` absolute positions, and block by
block; keys that a query does not see enter as exact zeros. So a token's bits are the same alone, in
a chunk, a chain or a tree. Rests on how the BLAS behind torch.bmm adds, which `in_order` probes.
Knows queries and keys; which slots a row's keys lie in and who sees whom comes from the plan.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from spec_serve.cache.pool import LayerKV

BLOCK = 128
"""Positions whose keys are summed one after the other before the block joins the total."""

LONGEST = 192
"""Keys one product may sum over: MKL starts a new partial sum after so many."""

SLICE = 64
"""Queries of one row that are scored together at most; more would only leave the cache."""

SCORES = 1 << 21
"""Scores held at a time, in values."""

COLUMNS = 16
"""Scores are made for a multiple of so many keys; below it MKL sums differently."""

SMALL = 400
"""torch.bmm leaves products of fewer multiplications to a loop of its own."""

ALIKE = 256
"""Rows whose numbers of keys differ by less may be scored together."""

HEAD = 64
"""Consecutive slots at the beginning of a row worth a product of their own."""

GRAIN = 1 << 15
"""Values torch gives a thread at least, in elementwise operations."""

LANES = 32
"""Values torch's vectorised loops take at a time, or a multiple of that."""

LOG2_E = 1.4426950408889634

OFFSET = 2.0**-12
"""See `_total`."""


def padded_rows(rows: int, dim: int) -> int:
    """Rows a product is run with: below 4, and beside a multiple of 4, MKL sums differently."""
    least = -(-SMALL // (2 * dim))
    return -(-max(rows, least) // 4) * 4


@cache
def in_order(kv_heads: int, dim: int, threads: int, value: int = 0) -> bool:
    """Whether torch.bmm sums as this module needs it, tried on shapes of `threads` threads.

    value: channels of a value, 0 = as many as a key's `dim`.

    Scores: the bits of an entry do not depend on how many queries and keys there are. Values: an
    entry is the chain fma(p[l], v[l], ...) over the keys in order, so that zeros change nothing.
    """
    with torch.inference_mode():
        generator = torch.Generator().manual_seed(1)

        def noise(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator)

        pool, queries = noise(600, kv_heads, dim), noise(kv_heads, 200, dim)
        k = pool.permute(1, 2, 0)  # [kv heads, D, keys]
        every = torch.bmm(queries, k)
        value = value or dim
        least = min(dim, value)
        counts = sorted({padded_rows(n, least) for n in (1, 4, 8, 12, 16, 20, 48, 100)})
        for count in counts:
            for length in (16, 48, 128, 272, 592):
                part = torch.bmm(queries[:, :count].contiguous(), k[:, :, :length])
                if not torch.equal(part, every[:, :count, :length]):
                    return False
        weights = noise(kv_heads, 200, LONGEST)
        weights[:, :, ::3] = 0
        values = noise(600, kv_heads, max(dim, value))[:, :, :value]
        total = torch.zeros(kv_heads, 200, value)
        start = noise(kv_heads, 200, value)
        for key in range(LONGEST):
            # A product of two floats is exact in a double, so this is a fused step (but for
            # double rounding, one case in 2^29).
            step = weights[:, :, key, None].double() * values[key, :, None].double()
            total = (step + total.double()).float()
            if key + 1 not in (2, 3, 16, 61, BLOCK, LONGEST):
                continue
            v = values[: key + 1].transpose(0, 1)
            for count in counts:
                p, wanted = weights[:, :count, : key + 1], total[:, :count]
                if not torch.equal(torch.bmm(p, v), wanted):
                    return False
                joined = start[:, :count].contiguous().baddbmm_(p, v)
                if not torch.equal(joined, start[:, :count] + wanted):
                    return False
    return True


@dataclass(slots=True)
class Part:
    """Up to SLICE queries of one row, batch nodes start..start+count-1, and the L keys they see.

    slots: [L] in the order of blocks, within a block in path order. seen: [count, L], None = all.
    bounds: where blocks begin and where the last one ends, [blocks + 1].
    """

    start: int
    count: int
    slots: Tensor
    seen: Tensor | None
    bounds: Sequence[int]


def chain_parts(
    start: int, count: int, slots: Tensor, lowest: int, window: int | None
) -> Iterator[Part]:
    """Parts of `count` nodes that follow each other and are the newest of the positions.

    slots: of positions lowest, lowest + 1, ... up to the last node's.
    """
    end = lowest + len(slots)  # first position without a slot
    for first in range(end - count, end, SLICE):
        last = min(first + SLICE, end)
        low = lowest if window is None else max(lowest, first - window + 1)
        seen = None
        if last - first > 1:
            here = torch.arange(first, last)[:, None]
            keys = torch.arange(low, last)
            seen = keys <= here
            if window is not None:
                seen &= keys > here - window
        bounds = [0, *range(BLOCK - low % BLOCK, last - low, BLOCK), last - low]
        part = slots[low - lowest : last - lowest]
        yield Part(start + first - (end - count), last - first, part, seen, bounds)


def tree_parts(start: int, slots: Tensor, positions: Tensor, seen: Tensor) -> Iterator[Part]:
    """Parts of any nodes; positions [L] of the keys at `slots`, seen [count, L].

    The keys of a path must stand in its order.
    """
    count = len(seen)
    needed = seen.any(0)
    if not bool(needed.all()):
        slots, positions, seen = slots[needed], positions[needed], seen[:, needed]
    blocks = positions // BLOCK
    order = blocks.argsort(stable=True)
    sizes = torch.unique_consecutive(blocks[order], return_counts=True)[1].tolist()
    if count > 1 and (count > SLICE or max(sizes) > LONGEST):
        half = count // 2
        yield from tree_parts(start, slots, positions, seen[:half])
        yield from tree_parts(start + half, slots, positions, seen[half:])
        return
    mask = seen[:, order] if count > 1 else None
    yield Part(start, count, slots[order], mask, [0, *accumulate(sizes)])


@dataclass(slots=True)
class _Places:
    """Slots of a part: consecutive ones as a slice, a view of the pool; others are gathered.

    keys: for all columns of the scores. values: (first column, end, slots) of each block.
    """

    keys: list[slice | Tensor]
    values: list[tuple[int, int, slice | Tensor]]


@dataclass(slots=True)
class _Row:
    """A part's views of its group's buffers, and the slots that go with them."""

    queries: Tensor  # [kv heads, lines, D]
    scores: Tensor  # [kv heads, lines, width]
    out: Tensor  # [kv heads, lines, D]
    keys: list[slice | Tensor]
    values: list[tuple[Tensor, slice | Tensor]]  # weights [kv heads, lines, L] of a block


def _lay_out(part: Part, width: int, pool: int) -> _Places:
    slots = part.slots
    length = len(slots)
    run = torch.zeros(length, dtype=torch.int64)
    torch.cumsum(slots[1:] != slots[:-1] + 1, 0, out=run[1:])
    runs: list[int] = run.tolist()  # equal = consecutive

    def place(start: int, stop: int, end: int) -> slice | Tensor:
        """Slots of columns start..stop-1, and any up to `end`."""
        low = int(slots[start])
        if runs[start] == runs[stop - 1] and low + end - start <= pool:
            return slice(low, low + end - start)
        if end == stop:
            return slots[start:stop]
        return torch.cat((slots[start:stop], slots[-1:].expand(end - stop)))

    values = [(a, b, place(a, b, b)) for a, b in pairwise(part.bounds)]
    head = min(bisect_right(runs, 0), width - COLUMNS)
    if length > head >= HEAD:
        return _Places([place(0, head, head), place(head, length, width)], values)
    return _Places([place(0, length, width)], values)


class OrderedGroup:
    """Parts of equally many queries, scored and normed together; buffers are kept over layers."""

    def __init__(
        self, parts: Sequence[Part], heads: int, kv_heads: int, dim: int, value: int, pool: int
    ) -> None:
        self._parts = parts
        first = parts[0]
        rows, count = len(parts), first.count
        group = heads // kv_heads
        self._used = count * group
        lines = padded_rows(self._used, min(dim, value))
        width = max(len(part.slots) for part in parts)
        width = -(-width // COLUMNS) * COLUMNS
        consecutive = all(part.start == first.start + i * count for i, part in enumerate(parts))
        self.nodes: slice | Tensor = (
            slice(first.start, first.start + rows * count)
            if consecutive
            else torch.cat([torch.arange(p.start, p.start + count) for p in parts])
        )
        self._shape = (rows, count, kv_heads, group, dim)
        self._queries = torch.zeros(rows, kv_heads, lines, dim)
        self._scores = torch.empty(rows, kv_heads, lines, width)
        self._out = torch.empty(rows, kv_heads, lines, value)
        self._hidden = self._mask(lines, width, group)
        self._masked = self._scores[:, :, :, width - self._hidden.shape[-1] :]
        self._rows = [self._row(i, _lay_out(part, width, pool)) for i, part in enumerate(parts)]
        self._padding = OFFSET * width

    def _row(self, i: int, places: _Places) -> _Row:
        scores = self._scores[i]
        values = [(scores[:, :, start:stop], at) for start, stop, at in places.values]
        return _Row(self._queries[i], scores, self._out[i], places.keys, values)

    def _mask(self, lines: int, width: int, group: int) -> Tensor:
        """[rows, 1, lines, columns], True = not seen; of the last columns, as far as needed."""
        hidden = torch.zeros(len(self._parts), 1, lines, width, dtype=torch.bool)
        for i, part in enumerate(self._parts):
            length = len(part.slots)
            hidden[i, :, :, length:] = True
            if part.seen is not None:
                hidden[i, 0, : self._used, :length] = ~part.seen.repeat_interleave(group, 0)
        columns = hidden.flatten(0, 2).any(0)
        clear = int(columns.int().argmax()) if bool(columns.any()) else width
        return hidden[:, :, :, clear:].contiguous()

    def attend(self, q: Tensor, kv: LayerKV, scale: float) -> Tensor:
        """q [rows * count, heads, D] -> [rows * count, heads, width of a value]."""
        rows, count, kv_heads, group, dim = self._shape
        scores, queries, out, used = self._scores, self._queries, self._out, self._used
        into = queries[:, :, :used].view(rows, kv_heads, count, group, dim)
        split = q.view(rows, count, kv_heads, group, dim).transpose(1, 2)
        torch.mul(split, scale * LOG2_E, out=into)
        for row in self._rows:
            _score(row, kv.k)
        if self._hidden.shape[-1]:
            self._masked.masked_fill_(self._hidden, float("-inf"))
        _exp2(scores.sub_(scores.amax(-1, keepdim=True)))
        total = _total(scores, self._padding)  # [rows, kv heads, lines, 1]
        for row in self._rows:
            _mix(row, kv.v)
        out.div_(total)
        mixed = out[:, :, :used].view(rows, kv_heads, count, group, -1).transpose(1, 2)
        return mixed.reshape(rows * count, kv_heads * group, -1)


def _exp2(x: Tensor) -> None:
    """2^x in place; x is contiguous, of a multiple of LANES values.

    Twice as fast as exp. torch computes what a thread has left beside whole vectors by another
    function, so no thread may be given a part of a vector.
    """
    count = x.numel()
    threads = min(torch.get_num_threads(), -(-count // GRAIN))
    if count % (LANES * threads) == 0:
        x.exp2_()
        return
    flat = x.view(-1)
    for start in range(0, count, GRAIN):
        flat[start : start + GRAIN].exp2_()


def _total(weights: Tensor, padding: float) -> Tensor:
    """Sum of weights 0..1 over the last axis, the same bits in whatever order they stand.

    With OFFSET added, every value is a multiple of 2^-35, and up to 2^18 of them add up in float64
    without rounding; `padding` is OFFSET times their number. The addition itself costs each weight
    an error of at most 2^-36 or its own half unit.
    """
    return (weights + OFFSET).sum(-1, keepdim=True, dtype=torch.float64).sub_(padding).float()


def _pick(stored: Tensor, at: slice | Tensor) -> Tensor:
    """[L, kv heads, D]: a view for consecutive slots."""
    return stored[at] if isinstance(at, slice) else stored.index_select(0, at)


def _score(row: _Row, stored: Tensor) -> None:
    if len(row.keys) == 1:
        torch.bmm(row.queries, _pick(stored, row.keys[0]).permute(1, 2, 0), out=row.scores)
        return
    parts = [torch.bmm(row.queries, _pick(stored, at).permute(1, 2, 0)) for at in row.keys]
    torch.cat(parts, -1, out=row.scores)


def _mix(row: _Row, stored: Tensor) -> None:
    """Weights times values, block after block."""
    out, fresh = row.out, True
    for weights, at in row.values:
        v = _pick(stored, at).transpose(0, 1)  # [kv heads, L, D]
        if fresh:
            torch.bmm(weights, v, out=out)
            fresh = False
        elif weights.shape[2] == 1:
            out.add_(weights * v)  # so short a product may be fused with the addition
        else:
            out.baddbmm_(weights, v)


def grouped(
    parts: Iterable[Part], heads: int, kv_heads: int, dim: int, value: int, pool: int
) -> list[OrderedGroup]:
    """Parts with as many queries and about as many keys together, in the order of nodes.

    pool: slots there are, in all.
    """
    alike: dict[tuple[int, int], list[Part]] = {}
    for part in parts:
        alike.setdefault((part.count, len(part.slots) // ALIKE), []).append(part)
    groups = []
    for (count, tier), members in alike.items():
        lines = kv_heads * padded_rows(count * heads // kv_heads, min(dim, value))
        most = max(1, SCORES // (lines * (tier + 1) * ALIKE))
        groups += [
            OrderedGroup(members[i : i + most], heads, kv_heads, dim, value, pool)
            for i in range(0, len(members), most)
        ]
    return groups
