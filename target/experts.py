"""A mixture of experts: the router, the experts of a layer, the MLP every token gets besides.

Which tokens share a step changes no bit of a token's result on a CPU: experts are packed linear
maps, scores are made in float64 and rounded, ties go to the expert with the lower number, and what
a token's experts give is added in the order of their scores. Elsewhere experts lie in one tensor
and kernels/grouped.py runs them. Knows no names of families (target/sparse.py has their settings).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.kernels.grouped import Grouped, gathered, mixed
from spec_serve.target.layers import MLP, Activation, Linear, can_pack, gated
from spec_serve.target.sparse import ExpertsConfig


class Source(Protocol):
    """Where a layer's tensors come from, by their names below the layer."""

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor on the model's device, in the model's dtype unless another is asked for."""
        ...


def best(scores: Tensor, count: int) -> Tensor:
    """[N, count] columns of the highest scores [N, E], the highest first; the lower one of two that
    are equal."""
    return torch.sort(scores, dim=-1, descending=True, stable=True).indices[:, :count]


@dataclass(frozen=True, slots=True)
class Router:
    """Chooses experts. correction: [E] float32, added while choosing only."""

    config: ExpertsConfig
    gate: Linear
    correction: Tensor | None

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [N, H] -> weights [N, k] float32 and numbers [N, k] of the chosen experts."""
        config = self.config
        logits = self.gate(x.float() if config.wide_router else x)  # [N, E]
        # Vectorised functions round otherwise than what is left over beside whole vectors, and
        # where that begins depends on N. In float64 only the rounding to float32 is left of it.
        wide = logits.double() if logits.device.type == "cpu" else logits.float()
        scores = wide.softmax(-1) if config.scoring == "softmax" else wide.sigmoid()
        ranked = scores if self.correction is None else scores + self.correction
        if config.groups > 1:
            ranked = self._limited(ranked)
        chosen = best(ranked, config.chosen)
        weights = scores.gather(1, chosen)
        if config.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return (weights * config.scale).float(), chosen

    def _limited(self, ranked: Tensor) -> Tensor:
        """Scores [N, E] with those outside the best groups at -inf."""
        config = self.config
        split = ranked.view(len(ranked), config.groups, -1)  # [N, G, E / G]
        of_groups = split.amax(-1)
        if config.group_by == "pair":
            of_groups = split.topk(2, -1).values.sum(-1)
        kept = torch.zeros_like(of_groups, dtype=torch.bool)
        kept.scatter_(1, best(of_groups, config.kept_groups), True)
        return split.masked_fill(~kept.unsqueeze(-1), float("-inf")).flatten(1)


class Experts(Protocol):
    """A layer's experts."""

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """x [N, H], weights and numbers [N, k] of each token's experts -> [N, H]."""
        ...


class PackedExperts:
    """Experts as linear maps of their own: what a CPU runs."""

    __slots__ = ("_act", "_maps")

    def __init__(self, maps: Sequence[tuple[Linear, Linear]], act: Activation) -> None:
        """maps: (gate and up, down) of each expert."""
        self._maps, self._act = tuple(maps), act

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `Experts`."""

        def run(expert: int, rows: Tensor) -> Tensor:
            gate_up, down = self._maps[expert]
            return down(gated(gate_up(rows), self._act))

        return mixed(gathered(x, chosen, len(self._maps), run), weights)


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """Experts in two tensors, gate_up [E, 2I, H] and down [E, H, I]."""

    gate_up: Tensor
    down: Tensor
    act: Activation
    grouped: Grouped

    def __call__(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """See `Experts`."""
        return self.grouped(x, self.gate_up, self.down, weights, chosen, self.act)


@dataclass(frozen=True, slots=True)
class Mixture:
    """An MLP made of experts. shared: what every token gets; gate: [H] -> its weight."""

    router: Router
    experts: Experts
    shared: MLP | None
    gate: Linear | None

    def __call__(self, x: Tensor, nodes: int | None = None) -> Tensor:
        """x: [N or more, H] -> as many rows of H. nodes: N, the rows that are no padding."""
        real = x if nodes is None else x[:nodes]
        made = self.experts(real, *self.router(real))
        if self.shared is None:
            return made if len(made) == len(x) else F.pad(made, (0, 0, 0, len(x) - len(made)))
        out = self.shared(x)
        if self.gate is not None:
            weight = self.gate(x)
            out *= weight.double().sigmoid().to(x.dtype)  # float64: see `Router`
        out[: len(made)] += made
        return out


def expert_tensors(config: ExpertsConfig, hidden: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name below a layer, shape) of every tensor of a mixture."""
    yield f"{config.block}.gate.weight", (config.count, hidden)
    if config.correction:
        yield f"{config.block}.gate.e_score_correction_bias", (config.count,)
    gate, up, down = config.expert
    inner = config.intermediate
    for e in range(config.count):
        one = f"{config.block}.experts.{e}."
        yield f"{one}{gate}.weight", (inner, hidden)
        yield f"{one}{up}.weight", (inner, hidden)
        yield f"{one}{down}.weight", (hidden, inner)
    if config.shared:
        for name in ("gate_proj", "up_proj"):
            yield f"{config.shared_name}.{name}.weight", (config.shared, hidden)
        yield f"{config.shared_name}.down_proj.weight", (hidden, config.shared)
    if config.shared_gate:
        yield f"{config.shared_name}_gate.weight", (1, hidden)


def read_mixture(
    config: ExpertsConfig, source: Source, act: Activation, grouped: Grouped
) -> Mixture:
    """A layer's mixture; every tensor of `expert_tensors` is there, in its shape."""
    name = f"{config.block}.gate."
    wide = torch.float32 if config.wide_router else None
    router = Router(
        config,
        Linear(source.tensor(name + "weight", wide)),
        source.tensor(name + "e_score_correction_bias", torch.float32)
        if config.correction
        else None,
    )
    shared = gate = None
    if config.shared:
        parts = [f"{config.shared_name}.{part}_proj.weight" for part in ("gate", "up", "down")]
        both = torch.cat([source.tensor(part) for part in parts[:2]])
        shared = MLP(Linear(both), Linear(source.tensor(parts[2])), act)
    if config.shared_gate:
        gate = Linear(source.tensor(f"{config.shared_name}_gate.weight"))
    return Mixture(router, _read_experts(config, source, act, grouped), shared, gate)


def _read_experts(
    config: ExpertsConfig, source: Source, act: Activation, grouped: Grouped
) -> Experts:
    gate, up, down = config.expert

    def one(e: int, *parts: str) -> list[Tensor]:
        return [source.tensor(f"{config.block}.experts.{e}.{part}.weight") for part in parts]

    first = one(0, down)[0]
    if first.device.type == "cpu" and can_pack(first.dtype):
        maps = []
        for e in range(config.count):
            maps.append((Linear(torch.cat(one(e, gate, up))), Linear(one(e, down)[0])))
        return PackedExperts(maps, act)
    hidden, inner = first.shape
    both = first.new_empty(config.count, 2 * inner, hidden)
    out = first.new_empty(config.count, hidden, inner)
    for e in range(config.count):
        torch.cat(one(e, gate, up), out=both[e])
        out[e] = one(e, down)[0]
    return StackedExperts(both, out, act, grouped)
