"""An engine put together from loaded parts: cache sized, cost curves measured.

Where the parts come from (names, files, downloads) is spec/load.py's business.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from spec_serve.cache.blocks import BlockLog
from spec_serve.cache.pool import KVPool
from spec_serve.cache.store import KVStore
from spec_serve.draft.base import Drafter, Source
from spec_serve.draft.cost import CostCurve
from spec_serve.draft.make import LOOKUPS, Lookups
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.base import AttentionBackend, pick_backend
from spec_serve.kernels.cpu.attention import NativeAttention
from spec_serve.spec.admission import EngineInfo, Limits
from spec_serve.spec.build import Builder
from spec_serve.spec.compiler import compiler_of
from spec_serve.spec.constraint import SOURCE
from spec_serve.spec.draft_cost import drafter_points
from spec_serve.spec.engine import Engine
from spec_serve.spec.grammar import Spelling
from spec_serve.spec.request import Mode
from spec_serve.spec.row import Row
from spec_serve.spec.runner import Sizes, graphs_fit, runner_for, workspace
from spec_serve.spec.scheduler import Scheduler
from spec_serve.spec.sizing import measure, pick_threads, size_store
from spec_serve.spec.step import TorchDevice
from spec_serve.target.model import Model
from spec_serve.target.native import NativeTransformer

Progress = Callable[[float], None]

SIZES = (1, 2, 3, 4, 5, 6, 8, 12, 16, 24, 32, 64)
BUSY_CHUNK = 128


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """What an operator chooses; 0 and "auto" mean: find out.

    block_events: tokens to a block in the log that is kept of the prefix cache, 0 = none is.
    kv_fraction: share of the memory free after loading that the K/V store may take. max_nodes:
    guesses per row and step at most. speculation: what requests that say nothing get; off = none
    for any request, and no look-up or draft is kept. quantize: how plain weights are held by the
    compiled model on a CPU; activations: bits it rounds activations to, 16 or 8; kv_dtype: auto or
    int8, how it keeps K and V. draft_taps: the
    target's boundaries a head reads ("2,15,27"), where its own configuration is not to be followed.
    cuda_graphs: auto = steps are recorded at start where they can be, off = never. adapt_folder:
    where a better head than the one of `draft` may appear (spec/adapt.py), "" = nowhere.
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
    block_events: int = 0
    quantize: str = "none"
    activations: str = "16"
    kv_dtype: str = "auto"
    draft_taps: str = ""
    cuda_graphs: str = "auto"
    adapt_folder: str = ""


def _unseen(share: float) -> None:
    return None


def assemble(
    target: Model,
    options: EngineOptions,
    *,
    drafter: Drafter | None = None,
    lookup: bool = True,
    attention: AttentionBackend | None = None,
    vocab_size: int = 0,
    cost: CostCurve | None = None,
    draft_cost: CostCurve | None = None,
    limits: Limits | None = None,
    spelling: Spelling | None = None,
    draft_told: str = "",
    progress: Progress = _unseen,
) -> Engine:
    """An engine around a loaded target.

    vocab_size: leading ids that mean something (0 = all of the head's rows); the rows behind them
    are padding, never emitted and refused in requests. cost, draft_cost: known cost curves; None =
    measure them now. spelling: the tokenizer constraints are compiled for; None = they are refused.
    draft_told: what its rehearsal found out about the drafter. progress: told the share of graphs
    recorded, on a GPU.
    """
    device = target.device
    if attention is None:
        attention = attention_for(target, options.attention)
    specs = (*target.kv_specs, *(drafter.kv_specs if drafter is not None else ()))
    context = _context(target, options)
    sizes = Sizes(
        options.max_rows, options.max_nodes, options.step_tokens, options.cuda_graphs == "auto"
    )
    kept = 0
    if device.type == "cuda":
        kept = workspace(target.config, sizes, sizes.graphs and graphs_fit(device, attention))
    slots = options.kv_tokens or size_store(
        specs, device, options.kv_fraction, options.max_rows * context, kept
    )
    pool = KVPool(specs, slots, options.max_rows, context, device)
    store = KVStore(slots, options.max_rows, pool)
    if options.block_events:
        store.tree.log = BlockLog(options.block_events)
    vocabulary = min(vocab_size or target.config.vocab, target.config.vocab)
    runner = runner_for(target, pool, attention, drafter, vocabulary, sizes, progress)
    timed = cost is None
    if cost is None:
        pick_threads(runner)
        cost = measure(runner, [n for n in SIZES if n == 1 or n < min(slots, context)])
    if drafter is not None and draft_cost is None:
        draft_cost = _draft_cost(drafter, pool, target, attention, cost, timed)
    lookups = Lookups(store) if lookup else None

    def sources(row: Row) -> list[Source]:
        if lookups is None:
            return []
        asked = row.request
        return lookups.sources(asked.salt, row.tokens, asked.speculation.prediction, row.prompt_len)

    mode = _mode(options, lookup or drafter is not None)
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
        dtype=target.precision,
        device=str(device),
        max_nodes=options.max_nodes,
        sources=(
            *(LOOKUPS if lookup else ()),
            *((drafter.name,) if drafter is not None else ()),
            *((SOURCE,) if spelling is not None and mode != "off" else ()),
        ),
        draft_told=draft_told,
    )
    scheduler = Scheduler(options.max_rows, options.step_tokens, BUSY_CHUNK)
    compiler = compiler_of(spelling) if spelling is not None else None
    return Engine(info, limits or Limits(), runner, store, scheduler, builder, compiler)


def attention_for(model: Model, name: str = "auto") -> AttentionBackend:
    """The backend a model runs with; a compiled one attends itself."""
    if isinstance(model, NativeTransformer):
        if name not in ("auto", "native"):
            raise ValueError(f"attention: a compiled model has its own, not {name!r}")
        return NativeAttention()
    return pick_backend(model.device, name)


def _context(target: Model, options: EngineOptions) -> int:
    """Tokens a row may hold."""
    most = target.config.max_context
    if options.max_context > most:
        raise ValueError(f"max-context: {options.max_context} exceeds the model's {most}")
    return options.max_context or most


def _mode(options: EngineOptions, drafts: bool) -> Mode:
    """What requests that say nothing get."""
    if not options.max_nodes or not drafts or options.speculation == "off":
        return "off"
    return "auto" if options.speculation == "auto" else "max"


def _forget(salt: str, tokens: object) -> None:
    return None


def _draft_cost(
    drafter: Drafter, pool: KVPool, target: Model, attention: AttentionBackend, cost: CostCurve,
    timed: bool,
) -> CostCurve:  # fmt: skip
    """What the drafter's forwards cost; timed: heads are timed, otherwise believed."""
    sizes = [n for n in SIZES if n <= min(16, pool.slots)]
    if isinstance(drafter, StandaloneDrafter):
        own = _borrowed(pool, len(target.kv_specs))
        return measure(TorchDevice(drafter.model, own, attention), sizes)
    points = drafter_points(drafter, pool, target.config.hidden, sizes) if timed else []
    # Untimed it is believed to cost a tenth of the target until it has run.
    return CostCurve(points or [(n, cost.at(n) / 10) for n in SIZES])


def _borrowed(pool: KVPool, first: int) -> KVPool:
    """A pool of the same slots that shows only the layers from `first` on."""
    borrowed = KVPool((), 1, 1, 1, pool.device)
    borrowed.layers, borrowed.table = pool.layers[first:], pool.table
    return borrowed
