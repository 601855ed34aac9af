"""The device half of an engine put together: which operations, whether graphs, room for them.

On NVIDIA GPUs a model runs by fused kernels and steps by fused operations; with Triton's attention,
which asks the device nothing, they are recorded as graphs at start. Elsewhere all of it is torch,
or compiled code. Knows parts and sizes; no requests.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from spec_serve.cache.pool import KVPool
from spec_serve.draft.base import Drafter, Plan
from spec_serve.draft.chooser import Chooser
from spec_serve.draft.standalone import StandaloneDrafter
from spec_serve.kernels.base import AttentionBackend
from spec_serve.kernels.graphs import Capture, CudaCapture
from spec_serve.spec.frames import MOST, tiers
from spec_serve.spec.graphs import StepGraphs
from spec_serve.spec.host_step import HostDevice
from spec_serve.spec.operations import step_operations_for
from spec_serve.spec.step import TorchDevice
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Model, Transformer
from spec_serve.target.operations import operations_for

log = logging.getLogger("spec_serve.graphs")

Progress = Callable[[float], None]

PER_GRAPH = 4 << 20
"""Bytes a recorded forward takes by itself: a few hundred launches with their arguments."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What steps may be: rows, guesses of a row, given tokens; graphs: whether to record any."""

    rows: int
    nodes: int
    tokens: int
    graphs: bool


def graphs_fit(device: torch.device, attention: AttentionBackend) -> bool:
    """Whether steps can be recorded: on a GPU, by attention that reads nothing back."""
    return device.type == "cuda" and attention.name == "triton"


def workspace(config: ModelConfig, sizes: Sizes, graphs: bool) -> int:
    """Bytes that steps take on a GPU besides weights and K/V: activations of the largest forward,
    logits of the largest tier, recorded graphs. Meant to err upwards."""
    inner = config.heads * config.head_dim + 2 * config.kv_heads * config.head_dim
    per_node = 4 * (4 * config.hidden + 2 * inner + 3 * config.intermediate)
    most = max(sizes.tokens + sizes.rows * (1 + sizes.nodes), MOST)
    logits = 3 * 4 * config.vocab * min(most, MOST)
    recorded = 2 * len(tiers(sizes.rows, sizes.nodes)) * PER_GRAPH if graphs else 0
    return most * per_node + logits + recorded


def runner_for(
    target: Model, pool: KVPool, attention: AttentionBackend, drafter: Drafter | None,
    vocabulary: int, sizes: Sizes, progress: Progress,
) -> TorchDevice:  # fmt: skip
    """What runs steps on the pool's device, recorded if it can be."""
    device = pool.device
    if device.type == "cpu":
        return HostDevice(target, pool, attention, drafter, vocabulary)
    models = [target, drafter.model] if isinstance(drafter, StandaloneDrafter) else [target]
    for model in models:
        if isinstance(model, Transformer):
            model.operations = operations_for(device)
    operations = step_operations_for(device)
    runner = TorchDevice(target, pool, attention, drafter, vocabulary, operations)
    if sizes.graphs and graphs_fit(device, attention):
        record(runner, CudaCapture(device), sizes, progress, early=True)
    return runner


def record(
    runner: TorchDevice, capture: Capture, sizes: Sizes, progress: Progress, early: bool = False
) -> None:
    """Give a runner graphs; if its model can't be recorded it goes on without, and the log says
    why. early: record drafting for one row too, instead of when it is asked for."""
    graphs = StepGraphs(runner.parts, capture, sizes.rows, sizes.nodes)
    plans: list[Plan] = []
    if early and runner.parts.drafter is not None:
        shapes = [shape for shape in Chooser.SHAPES if shape[0] * shape[1] <= sizes.nodes]
        plans = [Plan(depth, width, depth * width) for depth, width in shapes]
    try:
        graphs.record(progress, plans)
    except RuntimeError:
        log.exception("steps can't be recorded as graphs and run without")
        return
    runner.graphs = graphs
    log.info("graphs: %d sizes of steps recorded", len(graphs.tiers))
