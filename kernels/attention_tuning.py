"""Which tile attention runs with on a GPU: candidates, timed once on a problem made up for it.

Choices are kept in a file beside Triton's compiled programs (tuning.py). Tiles depend on a layer's
shape and on the class of the batch, not on its context: only their order of merit counts. While a
graph is being captured nothing can be timed, and an unknown shape gets its default.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import LayerKV
from spec_serve.cache.tree import TokenTree, chain
from spec_serve.kernels.tree_attention import (
    HEAD_DIMS,
    Shape,
    TritonAttention,
    TritonPlan,
    default_tile,
)
from spec_serve.kernels.tuning import Tile, Tuner

CONTEXT = 2048
# Rows and nodes of each in the problem of a kind.
PROBLEMS = {"root": (4, 1), "tree": (2, 31), "chunk": (1, 512)}
WARM, TIMED = 2, 10


def candidates(shape: Shape) -> list[Tile]:
    """What is tried for a shape, the default first."""
    lines = {"root": (16,), "tree": (16, 32, 64, 128), "chunk": (64, 128)}[shape.kind]
    tiles = [default_tile(shape)]
    for count in lines:
        for keys in (16, 32, 64, 128):
            if count < shape.lanes or count * keys > 128 * 64:
                continue
            if shape.head_dim > HEAD_DIMS[-1] and (count > 64 or keys > 64):
                continue
            tiles += [Tile(count, keys, 4 if count < 128 else 8, stages) for stages in (2, 3)]
    return list(dict.fromkeys(tiles))


class TunedTiles:
    """The tile for a shape on one device: what `TritonAttention` takes as `choose`."""

    def __init__(self, device: torch.device, path: Path | None = None) -> None:
        """path: where choices are kept, None = beside Triton's own cache."""
        found = torch.cuda.get_device_properties(device)
        self._device = device
        self._processors = found.multi_processor_count
        self._name = f"{found.name}|{triton.__version__}"
        self._tuner = Tuner(path or Path(triton.knobs.cache.dir) / "spec-serve-tiles.json")
        self._chosen: dict[Shape, Tile] = {}

    def __call__(self, shape: Shape) -> Tile:
        tile = self._chosen.get(shape)
        if tile is None:
            if torch.cuda.is_current_stream_capturing():
                return default_tile(shape)
            problem = _Problem(shape, self._device, self._processors)
            key = f"{self._name}|{shape}"
            tile = self._tuner.best(key, candidates(shape), problem.seconds)
            self._chosen[shape] = tile
        return tile


class _Problem:
    """A batch of the shape's kind over a small pool."""

    def __init__(self, shape: Shape, device: torch.device, processors: int) -> None:
        rows, nodes = PROBLEMS[shape.kind]
        tree = chain(range(nodes)) if shape.kind == "chunk" else _binary(nodes)
        per_row = CONTEXT + nodes
        starts = range(1, rows * per_row + 1, per_row)
        twigs = [
            Twig(row, CONTEXT, tree, range(start + CONTEXT, start + per_row), 0)
            for row, start in enumerate(starts)
        ]
        latent = shape.tail > 0  # one K/V head, which the backend spreads again
        pool = (rows * per_row + 1, 1 if latent else shape.kv_heads, shape.head_dim + shape.tail)
        self._batch = build_batch(twigs, device)
        self._table = torch.tensor([list(range(s, s + per_row)) for s in starts], device=device)
        k, v = (torch.zeros(pool, dtype=shape.dtype, device=device) for _ in "kv")
        self._kv = LayerKV(k, k[:, :, : shape.head_dim] if latent else v)
        self._q = self._zeros(shape, rows * nodes)
        self._processors = processors

    def _zeros(self, shape: Shape, nodes: int) -> Tensor:
        size = (nodes, shape.heads, shape.head_dim + shape.tail)
        return torch.zeros(size, dtype=shape.dtype, device=self._table.device)

    def seconds(self, tile: Tile) -> float:
        """Of one launch with this tile, planning left out."""
        plan = TritonAttention(self._processors, lambda _: tile).plan(self._batch, self._table)
        self._launch(plan, WARM)
        event: Callable[..., Any] = torch.cuda.Event
        begin, end = event(enable_timing=True), event(enable_timing=True)
        begin.record()
        self._launch(plan, TIMED)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / (1e3 * TIMED)

    def _launch(self, plan: TritonPlan, times: int) -> None:
        for _ in range(times):
            plan.attend_written(self._q, self._kv, scale=1.0)


def _binary(nodes: int) -> TokenTree:
    return TokenTree(range(nodes), [(i - 1) // 2 for i in range(nodes)], 1)
