"""A head's first weights, taken from its target: what is known need not be learnt.

The output rows and final norm are the target's, its last MLP lends the inner directions, and two
regressions find the target's final state from the features and the next state from that one and the
token between. The second goes through attention heads that are made to look at their own pair. A
head that starts so guesses a third of all tokens before its first step of training. Knows the
target's tensors by name only through `TargetParts`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.train.head import EagleHead
from spec_serve.draft.train.unroll import Example
from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Weights, layout

SHARPNESS = 1.25
"""How strongly the first query head of a group looks at its own pair: a score of 10 for D = 64."""

DOUBT = 0.75
"""What the logits of a linear guess are scaled by: it is less sure than the target."""


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What of a target is used, float32. embedding and rows: [V, H]; norm: [H]; the rest is of its
    last layer."""

    embedding: Tensor
    rows: Tensor
    norm: Tensor
    gate: Tensor
    up: Tensor
    mlp_norm: Tensor


def target_parts(weights: Weights) -> TargetParts:
    """Read the parts from a checkpoint. ConfigError names what is missing."""
    config = ModelConfig.from_checkpoint_config(weights.config)
    found = layout(weights, config)
    last = f"{found.prefix}layers.{config.layers - 1}."
    behind = "pre_feedforward_layernorm" if config.sandwich_norms else "post_attention_layernorm"

    def read(name: str) -> Tensor:
        return weights.tensor(name, torch.float32)

    def norm(name: str) -> Tensor:
        return read(name) + 1.0 if config.zero_centred else read(name)

    embedding = read(found.prefix + "embed_tokens.weight")
    return TargetParts(
        embedding=embedding * config.embed_scale,
        rows=embedding if found.head is None else read(found.head),
        norm=norm(found.prefix + "norm.weight"),
        gate=read(last + "mlp.gate_proj.weight"),
        up=read(last + "mlp.up_proj.weight"),
        mlp_norm=norm(f"{last}{behind}.weight"),
    )


def warm_start(
    head: EagleHead, target: TargetParts, kept: Tensor, examples: Sequence[Example], seed: int
) -> None:
    """Set all weights of `head`. kept: [D] target ids of its vocabulary."""
    shape = head.shape
    chance = torch.Generator().manual_seed(seed)
    found = regress(target, examples, shape.eps, shape.kv_heads * shape.head_dim)
    tensors = {name: held.clone() for name, held in head.named().items()}
    tensors["fc.weight"] = found.features
    tensors["lm_head.weight"] = target.rows[kept]
    tensors["norm.weight"] = target.norm * DOUBT
    if shape.intermediate == target.gate.shape[0]:
        tensors["midlayer.mlp.gate_proj.weight"] = target.gate
        tensors["midlayer.mlp.up_proj.weight"] = calmed(target, examples)
        tensors["midlayer.post_attention_layernorm.weight"] = target.mlp_norm
    else:
        for name in ("gate", "up"):
            size = (shape.intermediate, shape.hidden)
            drawn = torch.randn(size, generator=chance) * shape.hidden**-0.5
            tensors[f"midlayer.mlp.{name}_proj.weight"] = drawn
    tensors |= {
        f"midlayer.self_attn.{name}.weight": held
        for name, held in _attention(head, target.embedding, found.step, chance).items()
    }
    head.take(tensors, found.usual)


def calmed(target: TargetParts, examples: Sequence[Example]) -> Tensor:
    """The last layer's up projection, scaled so that what the MLP's inner units hold is about 1/2.

    In a trained target they hold far more, and every small step of what reads them, which begins
    at zero, would throw the output about.
    """
    states = torch.cat([e.hidden[e.first + 1 :].float() for e in examples[:16]]) / target.norm
    x = states * target.mlp_norm
    inner = F.silu(x @ target.gate.T) * (x @ target.up.T)
    return target.up * (0.5 / inner.pow(2).mean().sqrt())


@dataclass(frozen=True, slots=True)
class Linear:
    """What least squares find. features: [H, T * H]. step: [H, 2H], see `regress`. usual: [T * H],
    the root mean square of each channel of the features."""

    features: Tensor
    step: Tensor
    usual: Tensor


def regress(
    target: TargetParts, examples: Sequence[Example], eps: float, rank: int, ridge: float = 1e-3
) -> Linear:
    """The best linear head: a feature, then one step from it.

    States are the target's final ones before the norm's weights. `features` makes of the taps at a
    token the state there; `step`, of at most `rank`, makes of [normed embedding of the next token;
    normed state] what the next state has more than this one. As that is what the residual stream
    adds, the same step serves for the head's own outputs.
    """
    hidden = target.norm.shape[0]
    features, usual = features_of(target, examples, eps, ridge)
    steps = _Normal(2 * hidden, hidden)
    for taps, _, token, following in _pairs(target, examples, eps):
        made = taps @ features.T
        normed = F.rms_norm(made, (hidden,), None, eps)
        steps.add(torch.cat((token, normed), -1), following - made)
    return Linear(features, steps.solve(ridge, rank), usual)


def features_of(
    target: TargetParts, examples: Sequence[Example], eps: float, ridge: float = 1e-3
) -> tuple[Tensor, Tensor]:
    """`features` [H, T * H] and `usual` [T * H] of a `Linear`."""
    sums = _Normal(examples[0].taps.shape[1], target.norm.shape[0])
    for taps, state, _, _ in _pairs(target, examples, eps):
        sums.add(taps, state)
    usual = (sums.gram.diagonal() / max(sums.count, 1)).sqrt().float().clamp_min(1e-6)
    return sums.solve(ridge), usual


def _pairs(
    target: TargetParts, examples: Sequence[Example], eps: float
) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Per example: taps, state, normed embedding of the next token, next state, all [Q, ...]."""
    hidden = target.norm.shape[0]
    for example in examples:
        part = slice(example.first, len(example.tokens) - 2)
        states = example.hidden.float() / target.norm
        following = target.embedding[example.tokens[1:-1][part]]
        yield (
            example.taps[:-2][part].float(),
            states[:-2][part],
            F.rms_norm(following, (hidden,), None, eps),
            states[1:-1][part],
        )


class _Normal:
    """Normal equations of a linear map, gathered in double precision."""

    def __init__(self, inputs: int, outputs: int) -> None:
        self.gram = torch.zeros(inputs, inputs, dtype=torch.float64)
        self._cross = torch.zeros(inputs, outputs, dtype=torch.float64)
        self.count = 0

    def add(self, x: Tensor, y: Tensor) -> None:
        self.gram += x.T @ x
        self._cross += x.T @ y
        self.count += len(x)

    def solve(self, ridge: float, rank: int | None = None) -> Tensor:
        """[outputs, inputs]; of this rank the one whose predictions are best."""
        # Columns differ in size by orders of magnitude: the ridge is relative to each one's own.
        scale = self.gram.diagonal().clamp_min(1e-12).sqrt()
        levelled = self.gram / scale / scale.unsqueeze(1)
        levelled.diagonal().add_(ridge)
        found = torch.linalg.solve(levelled, self._cross / scale.unsqueeze(1)) / scale.unsqueeze(1)
        if rank is not None and rank < found.shape[1]:
            # Reduced-rank regression: the leading directions of what is predicted.
            spread = found.T @ self.gram @ found
            main = torch.linalg.eigh(spread).eigenvectors[:, -rank:]
            found = found @ main @ main.T
        made: Tensor = found.T.float().contiguous()
        return made


def _attention(
    head: EagleHead, embedding: Tensor, step: Tensor, chance: torch.Generator
) -> dict[str, Tensor]:
    """Projections whose scores are highest where a pair's embedding meets itself.

    Values carry `step` [H, 2H], whose rank is at most their width; the first query head of each
    group hands it on, the others start silent.
    """
    shape = head.shape
    hidden, dim, groups = shape.hidden, shape.head_dim, shape.kv_heads
    per_group = shape.heads // groups
    normed = F.rms_norm(embedding, (hidden,), None, shape.eps)
    mean = F.normalize(normed.mean(0), dim=0)
    # What all embeddings have in common would make every pair look like every other.
    drawn = torch.randn(hidden, groups * dim, generator=chance)
    drawn -= torch.outer(mean, mean @ drawn)
    query = torch.zeros(shape.heads * dim, 2 * hidden)
    key = torch.zeros(groups * dim, 2 * hidden)
    value = torch.zeros(groups * dim, 2 * hidden)
    out = torch.zeros(hidden, shape.heads * dim)
    left, size, right = torch.linalg.svd(step, full_matrices=False)
    for group in range(groups):
        own = slice(group * dim, (group + 1) * dim)
        ray = torch.linalg.qr(drawn[:, own]).Q.T * SHARPNESS**0.5  # [D, H]
        key[own, :hidden] = ray
        for i in range(per_group):
            at = (group * per_group + i) * dim
            query[at : at + dim, :hidden] = ray * 0.5**i
        # Large and small directions spread over all groups.
        picked = torch.arange(group, min(groups * dim, len(size)), groups)
        root = size[picked].sqrt()
        value[group * dim : group * dim + len(picked)] = right[picked] * root.unsqueeze(1)
        first = group * per_group * dim
        out[:, first : first + len(picked)] = left[:, picked] * root
    noise = 0.02 * hidden**-0.5
    for held in (query, key):
        held += noise * torch.randn(held.shape, generator=chance)
    return {"q_proj": query, "k_proj": key, "v_proj": value, "o_proj": out}
