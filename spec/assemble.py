"""An engine put together from loaded parts: cache sized, cost curves measured.

Where the parts come from (names, files, downloads) is spec/load.py's business.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from time import perf_counter

import torch

from spec_serve.cache.batch import Twig
from spec_serve.cache.pool import KVPool, KVSpec, bytes_per_slot
from spec_serve.cache.store import KVStore
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Drafter, Source
from spec_serve.draft.budget import CostCurve
from spec_serve.draft.make import LOOKUPS, Lookups
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.base import AttentionBackend, pick_backend
from spec_serve.spec.admission import EngineInfo, Limits
from spec_serve.spec.build import Builder
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Mode, Sampling
from spec_serve.spec.row import Row
from spec_serve.spec.sampling import RowSampling
from spec_serve.spec.scheduler import Scheduler
from spec_serve.spec.step import Job, TorchDevice
from spec_serve.target.model import Transformer

SIZES = (1, 2, 4, 8, 16, 32, 64)
BUSY_CHUNK = 128
HELD_BACK = 64 << 20  # bytes never given to the K/V store when it is sized by what is free


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an operator chooses; 0 and "auto" mean: find out.

    kv_fraction: share of the memory free after loading that the K/V store may take. max_nodes:
    guesses per row and step at most. speculation: what requests that say nothing get.
    """

    target: str
    draft: str = "lookup"
    device: str = "auto"
    dtype: str = "auto"
    kv_fraction: float = 0.3
    kv_tokens: int = 0
    max_rows: int = 32
    max_context: int = 0
    step_tokens: int = 512
    max_nodes: int = 32
    speculation: str = "auto"
    attention: str = "auto"


def assemble(
    target: Transformer,
    options: EngineOptions,
    *,
    drafter: Drafter | None = None,
    lookup: bool = True,
    attention: AttentionBackend | None = None,
    vocab_size: int = 0,
    cost: CostCurve | None = None,
    limits: Limits | None = None,
) -> Engine:
    """An engine around a loaded target.

    vocab_size: leading ids that mean something (0 = all of the head's rows); the rows behind them
    are padding, never emitted and refused in requests. cost: a known cost curve; None = measure
    it now.
    """
    device = target.device
    if attention is None:
        attention = pick_backend(device, options.attention)
    specs = (*target.kv_specs, *(drafter.kv_specs if drafter is not None else ()))
    context = target.config.max_context
    if options.max_context:
        if options.max_context > context:
            raise ValueError(f"max-context: {options.max_context} exceeds the model's {context}")
        context = options.max_context
    slots = options.kv_tokens or _size_store(specs, device, options, context)
    pool = KVPool(specs, slots, options.max_rows, context, device)
    store = KVStore(slots, options.max_rows, pool)
    vocabulary = min(vocab_size or target.config.vocab, target.config.vocab)
    runner = TorchDevice(target, pool, attention, drafter, vocabulary)
    sizes = [n for n in SIZES if n == 1 or n <= min(slots - 1, context - 1)]
    if cost is None:
        cost = measure(runner, sizes)
    draft_cost = None
    if isinstance(drafter, StandaloneDrafter):
        own = TorchDevice(
            drafter.model,
            _borrowed(pool, len(target.kv_specs)),
            attention,
        )
        draft_cost = measure(own, [n for n in sizes if n <= 16])
    elif drafter is not None:
        # A drafter of unknown make: believed to cost a tenth of the target until it has run.
        draft_cost = CostCurve([(n, cost.at(n) / 10) for n in sizes])
    lookups = Lookups(store) if lookup else None

    def sources(row: Row) -> list[Source]:
        if lookups is None:
            return []
        asked = row.request
        return lookups.sources(
            asked.salt, row.tokens, asked.speculation.prediction, row.prompt_len
        )

    mode: Mode = "off"
    if options.max_nodes and (lookup or drafter is not None):
        mode = "auto" if options.speculation == "auto" else "max"
        if options.speculation == "off":
            mode = "off"
    builder = Builder(
        store,
        cost,
        drafter if mode != "off" else None,
        draft_cost if mode != "off" else None,
        sources,
        lookups.retired if lookups is not None else _forget,
        mode,
        options.max_nodes,
    )
    info = EngineInfo(
        model=options.target,
        draft=options.draft,
        vocab_size=vocabulary,
        max_context=context,
        kv_tokens=slots,
        max_rows=options.max_rows,
        dtype=str(target.dtype).removeprefix("torch."),
        device=str(device),
        max_nodes=options.max_nodes,
        sources=(
            *(LOOKUPS if lookup else ()),
            *((drafter.name,) if drafter is not None else ()),
        ),
    )
    scheduler = Scheduler(options.max_rows, options.step_tokens, BUSY_CHUNK)
    return Engine(info, limits or Limits(), runner, store, scheduler, builder)


def _forget(salt: str, tokens: object) -> None:
    return None


def _borrowed(pool: KVPool, first: int) -> KVPool:
    """A pool of the same slots that shows only the layers from `first` on."""
    borrowed = KVPool((), 1, 1, 1, pool.device)
    borrowed.layers, borrowed.table = pool.layers[first:], pool.table
    return borrowed


def measure(device: TorchDevice, sizes: list[int]) -> CostCurve:
    """Time a step over n nodes for each n, several times; the quickest counts.

    Other work on the machine only ever makes a step slower.
    """
    points: list[tuple[int, float]] = []
    state = RowSampling(Sampling(), 0, device.model.config.vocab, [1], 0, frozenset())
    for n in sizes:
        twig = Twig(0, 0, chain([1] * n, given=1), range(1, n + 1), 0)
        job = Job([twig], [state], [0], [-1], n - 1)
        device.step(job)
        times: list[float] = []
        while len(times) < 2 or (len(times) < 6 and sum(times) < 0.3):
            begun = perf_counter()
            device.step(job)
            times.append(perf_counter() - begun)
        ms = min(times) * 1e3
        points.append((n, max(ms, points[-1][1] if points else 0.0)))
    return CostCurve(points)


def _size_store(
    specs: tuple[KVSpec, ...], device: torch.device, options: EngineOptions, context: int
) -> int:
    """Slots that fit into the chosen share of free memory, at most what the rows can use."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        try:
            with open("/proc/meminfo") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        free = int(line.split()[1]) * 1024
        except OSError:
            pass
    share = int(max(free - HELD_BACK, 0) * options.kv_fraction)
    slots = min(share // max(bytes_per_slot(specs), 1), options.max_rows * context)
    if slots < 64:
        raise ValueError(
            f"kv-fraction: only {slots} tokens fit into {share >> 20} MiB; raise it or free memory"
        )
    return int(slots)
