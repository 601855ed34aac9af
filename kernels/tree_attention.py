"""Tree attention in Triton as a backend: tiles, splits, scratch and launches.

Nothing is read back from the device: how many items there can be follows from the number of nodes
and rows, and which there are is decided by a program of its own (attention_programs.py). So batch 1
fills the chip (long prefixes are split, and merged by log-sum-exp), a long chain beside roots makes
no empty launches, and a forward can be captured in a graph. Knows batches and K/V pools; no models.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import LayerKV
from spec_serve.kernels import attention_programs as programs
from spec_serve.kernels.tuning import Tile

# Items beyond one per tile, per multiprocessor: enough to fill it while others end.
WAVES = 2
# Blocks of keys a split has at least: less is not worth merging.
LEAST = 2
# Lines of a tile that one program merges.
LINES = 4
# Numbers of rows that programs are compiled for; beyond, powers of two.
TIERS = (16, 128)
# Query heads a program takes at most of a K/V head with a tail: sums as wide fill the registers.
MOST_LANES = 16
# Head sizes the programs were tried with; what lies between is padded to a power of two.
HEAD_DIMS = (64, 80, 96, 128, 192, 256)


@dataclass(frozen=True, slots=True)
class Shape:
    """What a layer's attention looks like to the programs. kind: average nodes of a row, in
    classes: "root" (1), "tree" (up to 64) or "chunk". tail: channels keys have more than values,
    whose are head_dim."""

    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    kind: str
    tail: int = 0

    @property
    def group(self) -> int:
        """Query heads of one K/V head."""
        return self.heads // self.kv_heads

    @property
    def lanes(self) -> int:
        """`group`, as a power of two."""
        return power(self.group)


Choose = Callable[[Shape], Tile]


def power(count: int) -> int:
    """The least power of two that is no less."""
    return 1 << max(count - 1, 0).bit_length()


def row_tier(rows: int) -> int:
    """What a program is compiled for instead of `rows`: few sizes, as compiling takes seconds."""
    return next((tier for tier in TIERS if rows <= tier), power(rows))


def kind_of(nodes: int, rows: int) -> str:
    """The class of a batch, see `Shape`."""
    return "root" if nodes <= rows else "tree" if nodes <= 64 * rows else "chunk"


def default_tile(shape: Shape) -> Tile:
    """A tile that fits any GPU of this decade: what runs until something better was measured."""
    lines = {"root": 16, "tree": 32, "chunk": 64}[shape.kind]
    wide = power(shape.head_dim) * shape.dtype.itemsize  # bytes of a key
    keys = 64 if wide <= 256 else 32 if wide <= 512 else 16
    if shape.head_dim > HEAD_DIMS[-1]:
        return Tile(max(min(lines, 32), shape.lanes), keys, 8, 2)
    return Tile(max(lines, shape.lanes), keys, 4, 2)


class _Work:
    """Items of one batch for one way of cutting it.

    work: [4, B + 1] int32. Row 0: first item of each batch row; 1: its first stored part; 2: its
    first tile to be merged; 3: its splits, and at the end blocks of keys per split.
    """

    def __init__(
        self, batch: TreeBatch, first: int, window: int, queries: int, keys: int, target: int
    ) -> None:
        rows = batch.rows
        self.data = torch.empty((4, rows + 1), dtype=torch.int32, device=batch.tokens.device)
        self.items = min(len(batch), len(batch) // queries + rows) + target
        programs.plan_work[(1,)](
            batch.node_ptr, batch.twig_ptr, batch.prefix, batch.positions, self.data, rows, first,
            target, WINDOW=window, QUERIES=queries, KEYS=keys, LEAST=LEAST, ROWS=row_tier(rows),
        )  # fmt: skip


class TritonPlan:
    """Attention of one batch, see `kernels/base.py`."""

    def __init__(
        self, batch: TreeBatch, table: Tensor, first: int, processors: int, choose: Choose
    ) -> None:
        assert table.stride(1) == 1 and batch.ancestors.is_contiguous()
        self._batch = batch
        self._table = table
        self._first = first
        self._processors = processors
        self._choose = choose
        self._work: dict[tuple[int, int, int, int], _Work] = {}
        self._scratch: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}

    @property
    def slots(self) -> Tensor:
        """[N] where the batch's K and V belong."""
        return self._batch.slots

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Write k and v, then attend; q [N, heads, D] -> [N, heads, width of a value]."""
        write_kv(k, v, kv, self._batch.slots)
        return self.attend_written(q, kv, scale=scale, window=window, softcap=softcap)

    def attend_written(
        self,
        q: Tensor,
        kv: LayerKV,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """The same where the nodes' K and V are in the pool already (fused.rope_and_store)."""
        batch = self._batch
        nodes, heads, dim = q.shape[0], q.shape[1], kv.v.shape[2]
        out = torch.empty((nodes, heads, dim), dtype=q.dtype, device=q.device)
        if not nodes:
            return out
        assert heads % kv.k.shape[1] == 0 and q.shape[2] == kv.k.shape[2] and q.stride(2) == 1
        assert kv.k.stride(2) == kv.v.stride(2) == 1
        tail = kv.k.shape[2] - dim
        if tail:
            kv = _spread(kv, heads)
        shape = Shape(heads, kv.k.shape[1], dim, q.dtype, kind_of(nodes, batch.rows), tail)
        tile = self._choose(shape)
        lanes, wide = shape.lanes, power(dim)
        queries = max(tile.lines // lanes, 1)
        target = -(-WAVES * self._processors // shape.kv_heads)
        reach = window or 0
        work = self._cut(reach, queries, tile.keys, target)
        part, stats = self._parts(2 * target, shape.kv_heads, queries * lanes, wide)
        words = batch.ancestors.shape[1]
        rows = row_tier(batch.rows)
        programs.attend_tile[(work.items, shape.kv_heads)](
            q, kv.k, kv.v, out, part, stats, work.data,
            batch.node_ptr, batch.twig_ptr, batch.twig_slots, batch.prefix, batch.chain,
            batch.row_ids, self._table, batch.positions, batch.ancestors,
            batch.rows, self._first, scale, softcap or 0.0,
            q.stride(0), q.stride(1), kv.k.stride(0), kv.k.stride(1), kv.v.stride(0),
            kv.v.stride(1), out.stride(0), out.stride(1), self._table.stride(0),
            HEADS=shape.kv_heads, GROUP=shape.group, LANES=lanes, D=dim, DIM=wide,
            TAIL=tail, TAIL_DIM=max(power(tail), 16), QUERIES=queries, KEYS=tile.keys,
            WINDOW=reach, NARROW=0 < reach < 64 * words,
            CAPPED=softcap is not None, WORDS=words, ROWS=rows,
            PRECISION="ieee" if q.dtype == torch.float32 else "tf32",
            WIDEN=q.device.type == "cpu", num_warps=tile.warps, num_stages=tile.stages,
        )  # fmt: skip
        lines = min(LINES, queries * lanes)
        programs.merge_splits[(target, shape.kv_heads, queries * lanes // lines)](
            out, part, stats, work.data, batch.node_ptr, batch.rows, out.stride(0), out.stride(1),
            HEADS=shape.kv_heads, GROUP=shape.group, LANES=lanes, D=dim, DIM=wide,
            QUERIES=queries, LINES=lines, ROWS=rows, num_warps=1,
        )  # fmt: skip
        return out

    def _cut(self, window: int, queries: int, keys: int, target: int) -> _Work:
        key = (window, queries, keys, target)
        if key not in self._work:
            self._work[key] = _Work(self._batch, self._first, *key)
        return self._work[key]

    def _parts(self, *shape: int) -> tuple[Tensor, Tensor]:
        """Where splits leave their results; layers follow each other and share it."""
        if shape not in self._scratch:
            device = self._batch.tokens.device
            part = torch.empty(shape, dtype=torch.float32, device=device)
            stats = torch.empty(shape[:-1], dtype=torch.float32, device=device)
            self._scratch[shape] = part, stats
        return self._scratch[shape]


def _spread(kv: LayerKV, heads: int) -> LayerKV:
    """One K/V head as several of the same, so that each has at most MOST_LANES query heads."""
    assert kv.k.shape[1] == 1 and kv.v.shape[1] == 1
    parts = next(n for n in range(-(-heads // MOST_LANES), heads + 1) if heads % n == 0)
    return LayerKV(kv.k.expand(-1, parts, -1), kv.v.expand(-1, parts, -1))


def write_kv(k: Tensor, v: Tensor, kv: LayerKV, slots: Tensor) -> None:
    """K and V [N, heads, D] to their slots [N], rounded to the pool's dtype."""
    nodes, heads, dim = k.shape
    if not nodes:
        return
    if kv.shared:  # V is a view of K
        v, kv = k, LayerKV(kv.k, kv.k)
    assert k.stride(2) == v.stride(2) == 1
    programs.store_kv[(nodes,)](
        k, v, kv.k, kv.v, slots, k.stride(0), k.stride(1), v.stride(0), v.stride(1),
        kv.k.stride(0), kv.k.stride(1), kv.v.stride(0), kv.v.stride(1),
        HEADS=heads, HEADS_P=power(heads), D=dim, DIM=power(dim), num_warps=1,
    )  # fmt: skip


class TritonAttention:
    """The Triton programs as a backend.

    processors: multiprocessors of the device that batches will be on. choose: the tile for a
    layer's shape. Sums are taken in an order that depends on the whole batch: near-ties may flip.
    """

    name = "triton"

    def __init__(self, processors: int, choose: Choose = default_tile) -> None:
        self._processors = processors
        self._choose = choose

    def plan(self, batch: TreeBatch, table: Tensor, first: int = 0) -> TritonPlan:
        """Prepare one forward; table [rows, positions] holds the slots of cached tokens."""
        return TritonPlan(batch, table, first, self._processors, self._choose)
