"""The compiled model against this machine: the curve of a step, and each matrix, in shares of what
the memory and the arithmetic units give at most.

The ceilings are measured in the same run (kernels/cpu/ceilings.py). Matrices are timed in the order
of the model, so that each comes from where it comes from in a step: a small model's may lie in the
cache, and then reach more than the memory's bandwidth. Knows no requests and no torch model.
"""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.kernels.cpu import ceilings, native
from spec_serve.kernels.cpu.attention import NativeAttention
from spec_serve.kernels.cpu.native import PackedMatrix, Pool
from spec_serve.spec.sizing import quickest
from spec_serve.spec.step import TorchDevice
from spec_serve.target.native import NativeTransformer

SECONDS = 0.2  # a forward is repeated for about so long
PARTS = ("q", "k", "v", "output", "gate", "up", "down")


@dataclass(frozen=True, slots=True)
class Ceilings:
    """What all threads reach together. memory: bytes/s; small, bytes_, floats: products/s with
    weights of at most 4 bits, of up to 8, and of float32."""

    threads: int
    isa: str
    memory: float
    small: float
    bytes_: float
    floats: float

    def products(self, bits: int) -> float:
        """For weights of so many bits."""
        return self.small if bits <= 4 else self.bytes_


def higher(one: Ceilings, other: Ceilings) -> Ceilings:
    """The better of two measurements: what else the machine does only ever makes them worse."""
    assert (one.threads, one.isa) == (other.threads, other.isa)
    return Ceilings(
        one.threads, one.isa, max(one.memory, other.memory), max(one.small, other.small),
        max(one.bytes_, other.bytes_), max(one.floats, other.floats),
    )  # fmt: skip


def measure_ceilings(pool: Pool, isa: str) -> Ceilings:
    """Takes about two seconds."""
    return Ceilings(
        pool.threads, isa, ceilings.bandwidth(pool), ceilings.arithmetic(pool, 4, isa),
        ceilings.arithmetic(pool, 8, isa), ceilings.arithmetic(pool, ceilings.FLOATS, isa),
    )  # fmt: skip


def named(model: NativeTransformer) -> list[tuple[str, PackedMatrix]]:
    """The matrices that a step multiplies with, in its order: the layers' and then the head."""
    held = model.matrices
    extra = len(held) - len(PARTS) * model.config.layers
    assert extra in (1, 2)
    layers = held[extra:]
    return [
        *((PARTS[i % len(PARTS)], matrix) for i, matrix in enumerate(layers)),
        ("head", held[extra - 1]),
    ]


def linear_s(
    matrices: Sequence[PackedMatrix], tokens: int, planes: int, pool: Pool, isa: str, repeat: int
) -> list[float]:
    """Seconds of each linear map, without the preparation of the activations.

    What that takes is measured by the same call on a matrix's first rows alone, and taken off. Of
    both the quickest of `repeat` counts; matrices come one after the other each time.
    """
    library = native.load()
    widest = max(held.matrix.outputs for held in matrices) + native.ROWS
    x = torch.randn(tokens, max(held.matrix.inputs for held in matrices))
    y = torch.empty(tokens, widest)

    def run(matrix: native.Matrix) -> float:
        begun = perf_counter()
        library.spec_native_linear(
            ctypes.byref(matrix), x.data_ptr(), tokens, y.data_ptr(), planes, isa.encode(),
            pool.handle,
        )  # fmt: skip
        return perf_counter() - begun

    whole = [float("inf")] * len(matrices)
    before: dict[int, float] = {}  # inputs -> seconds
    for _ in range(repeat):
        for i, held in enumerate(matrices):
            whole[i] = min(whole[i], run(held.matrix))
            if i % 8 == 0 or held.matrix.inputs not in before:
                first = native.Matrix.from_buffer_copy(held.matrix)
                first.outputs = min(native.ROWS, held.matrix.outputs)
                inputs = held.matrix.inputs
                before[inputs] = min(run(first), before.get(inputs, float("inf")))
    made = []
    for held, seconds in zip(matrices, whole, strict=True):
        groups = -(-held.matrix.outputs // native.ROWS)
        net = (seconds - before[held.matrix.inputs]) * groups / max(groups - 1, 1)
        made.append(net if groups > 1 else seconds)
    return made


def operators(
    model: NativeTransformer, tokens: int, found: Ceilings, repeat: int
) -> list[dict[str, Any]]:
    """One record per part of a block and the head: milliseconds per step over all layers, and the
    shares of both ceilings."""
    matrices = named(model)
    took = linear_s(
        [held for _, held in matrices], tokens, model.planes, Pool(model.threads), model.isa, repeat
    )
    sums: dict[tuple[str, int, str], list[float]] = defaultdict(lambda: [0.0] * 4)
    for (name, held), seconds in zip(matrices, took, strict=True):
        shape = held.matrix
        key = (name, shape.bits, f"{shape.outputs}x{shape.inputs}")
        work = shape.outputs * shape.inputs * tokens * model.planes
        for i, value in enumerate((1.0, seconds, float(held.nbytes), float(work))):
            sums[key][i] += value
    return [
        {
            "nodes": tokens, "part": name, "bits": bits, "shape": shape_, "count": int(count),
            "ms": seconds * 1e3, "GB/s": nbytes / seconds / 1e9,
            "memory": nbytes / seconds / found.memory, "GMAC/s": work / seconds / 1e9,
            "arithmetic": work / seconds / found.products(bits),
        }
        for (name, bits, shape_), (count, seconds, nbytes, work) in sums.items()
    ]  # fmt: skip


def attention(
    model: NativeTransformer, tokens: int, context: int, found: Ceilings, repeat: int
) -> dict[str, Any]:
    """What `context` cached tokens add to a forward over `tokens` nodes, as `operators` has it.

    Keys and values are read as they are kept, once for all nodes, and multiplied as floats. Where
    other programs made the longer context the quicker one there are no rates: None."""
    config = model.config
    seconds = forward_s(model, tokens, context, repeat) - forward_s(model, tokens, 0, repeat)
    kept = 2 * config.layers * config.kv_heads * config.head_dim * context
    work = 2 * config.layers * config.heads * config.head_dim * context * tokens
    nbytes = kept * model.dtype.itemsize
    read, made = (nbytes / seconds, work / seconds) if seconds > 0 else (None, None)
    return {
        "nodes": tokens, "part": "attention", "bits": 8 * model.dtype.itemsize,
        "shape": f"{context} keys", "count": config.layers, "ms": seconds * 1e3,
        "GB/s": read and read / 1e9, "memory": read and read / found.memory,
        "GMAC/s": made and made / 1e9, "arithmetic": made and made / found.floats,
    }  # fmt: skip


def forward_s(model: NativeTransformer, nodes: int, context: int, repeat: int) -> float:
    """Seconds of one forward over a chain behind `context` tokens: the quickest of at least
    `repeat`, and of more where they are short."""
    pool = KVPool(model.kv_specs, context + nodes, 1, context + nodes, model.device)
    pool.assign(0, 0, range(1, context + 1))
    slots = range(context + 1, context + nodes + 1)
    twig = Twig(0, context, chain([1] * nodes, given=1), slots, 0)
    batch = build_batch([twig], model.device)
    plan = NativeAttention().plan(batch, pool.table)
    took: list[float] = []
    while len(took) <= repeat or (sum(took) < SECONDS and len(took) < 50):
        begun = perf_counter()
        model.forward(batch, pool.layers, plan)
        took.append(perf_counter() - begun)
    return min(took[1:])


def curve(
    model: NativeTransformer, sizes: Sequence[int], context: int, found: Ceilings, repeat: int
) -> list[dict[str, Any]]:
    """One record per number of nodes: the forward alone, the whole step (batch, forward, choice,
    check, bookkeeping; no context), the ratio to one node, the linear maps and what is left."""
    matrices = named(model)
    nbytes = sum(held.nbytes for _, held in matrices)
    ideal = sum(
        held.matrix.outputs * held.matrix.inputs / found.products(held.matrix.bits)
        for _, held in matrices
    )
    most = max(sizes)
    pool = KVPool(model.kv_specs, most + 1, 1, most + 1, model.device)
    device = TorchDevice(model, pool, NativeAttention())
    records: list[dict[str, Any]] = []
    base = 0.0
    for n in sizes:
        seconds = forward_s(model, n, context, repeat)
        base = base or seconds
        linear = sum(one["ms"] for one in operators(model, n, found, repeat))
        records.append({
            "nodes": n, "step ms": quickest(device, n), "forward ms": seconds * 1e3,
            "ratio": seconds / base, "linear ms": linear, "rest ms": seconds * 1e3 - linear,
            "tokens/s": n / seconds, "memory": nbytes / seconds / found.memory,
            "arithmetic": ideal * n * model.planes / seconds,
        })  # fmt: skip
    return records
