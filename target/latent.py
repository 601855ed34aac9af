"""Attention over latents (MLA): a slot keeps one vector per token, from which all heads read.

The absorbed form of DeepSeek-V2 (arXiv 2405.04434, section 2.1): what turns the latent into a
head's keys is applied to the query instead, and what turns it into values to the head's sum, so a
key is the latent with the rotated channels behind it, and a value is the latent itself. Knows
shapes and arithmetic; where weights come from is the caller's concern.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.pool import LayerKV
from spec_serve.kernels.base import AttentionPlan
from spec_serve.target.experts import Source
from spec_serve.target.layers import Linear, RMSNorm, can_pack
from spec_serve.target.rope import Rotation, rotate
from spec_serve.target.sparse import LatentConfig

EPS = 1e-6
"""Of the norms of latents, whatever the model's other norms have."""


class HeadMaps:
    """A linear map per head, weight [heads, out, in].

    On a CPU they are packed one by one, as the bits of a batched product depend on its rows.
    """

    __slots__ = ("_maps", "_weight")

    def __init__(self, weight: Tensor) -> None:
        self._maps: list[Linear] = []
        self._weight: Tensor | None = None
        if weight.device.type == "cpu" and can_pack(weight.dtype):
            self._maps = [Linear(one.contiguous()) for one in weight]
        else:
            self._weight = weight.transpose(1, 2).contiguous()  # [heads, in, out]

    def __call__(self, x: Tensor) -> Tensor:
        """x: [N, heads, in] -> [N, heads, out]."""
        if self._weight is not None:
            return torch.bmm(x.transpose(0, 1), self._weight).transpose(0, 1)
        made = [run(x[:, h].contiguous()) for h, run in enumerate(self._maps)]
        return torch.stack(made, 1)


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Attention of one layer over latents.

    down: to the queries (or their latent), the latent and the rotated key, one behind the other.
    query_norm, query_up: from the queries' latent, None = there is none. to_latent: a query's
    plain channels to the latent's. to_value: a head's sum of latents to its value.
    """

    config: LatentConfig
    heads: int
    down: Linear
    query_norm: RMSNorm | None
    query_up: Linear | None
    norm: RMSNorm
    to_latent: HeadMaps
    to_value: HeadMaps
    out: Linear
    scale: float
    window: None = None

    def rows(self, rows: int) -> int:
        """Rows that `rows` are computed as, see `Linear.rows`."""
        return self.down.rows(rows)

    def _keys(self, y: Tensor, rotation: Rotation) -> Tensor:
        """y [N, ...] of `down` -> [N, 1, latent + rotated]."""
        config = self.config
        latent, turned = y[:, -config.key :].split_with_sizes([config.kv_rank, config.rope], 1)
        return torch.cat((self.norm(latent).unsqueeze(1), rotate(turned.unsqueeze(1), rotation)), 2)

    def __call__(self, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """x: [N or more, H] -> as many rows of H; writes the latents of the N nodes to `kv`.

        N is rotation's; rows beyond are padding.
        """
        config, heads = self.config, self.heads
        nodes, rows = rotation[0].shape[0], x.shape[0]
        y = self.down(x)
        q = y[:, : -config.key]
        if self.query_norm is not None and self.query_up is not None:
            q = self.query_up(self.query_norm(q))
        q = q[:nodes].view(nodes, heads, config.nope + config.rope)
        plain, turned = q.split_with_sizes([config.nope, config.rope], 2)
        q = torch.cat((self.to_latent(plain), rotate(turned, rotation)), 2)
        k = self._keys(y[:nodes], rotation)
        summed = plan.attend(q, k, k[:, :, : config.kv_rank], kv, scale=self.scale)
        made = self.to_value(summed).reshape(nodes, heads * config.value)
        if nodes != rows:
            made = F.pad(made, (0, 0, 0, rows - nodes))
        return self.out(made)

    def note(self, x: Tensor, rotation: Rotation, kv: LayerKV, slots: Tensor) -> None:
        """What `__call__` writes for x [N, H], and nothing else, to `slots` [N]."""
        kv.k.index_copy_(0, slots, self._keys(self.down(x)[: len(slots)], rotation))


def latent_tensors(
    config: LatentConfig, heads: int, hidden: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    """(name below a layer, shape) of every tensor of the attention."""
    queries = heads * (config.nope + config.rope)
    name = "self_attn."
    if config.query_rank:
        yield name + "q_a_proj.weight", (config.query_rank, hidden)
        yield name + "q_a_layernorm.weight", (config.query_rank,)
        yield name + "q_b_proj.weight", (queries, config.query_rank)
    else:
        yield name + "q_proj.weight", (queries, hidden)
    yield name + "kv_a_proj_with_mqa.weight", (config.key, hidden)
    yield name + "kv_a_layernorm.weight", (config.kv_rank,)
    yield name + "kv_b_proj.weight", (heads * (config.nope + config.value), config.kv_rank)
    yield name + "o_proj.weight", (hidden, heads * config.value)
    if config.bias:
        if config.query_rank:
            yield name + "q_a_proj.bias", (config.query_rank,)
        yield name + "kv_a_proj_with_mqa.bias", (config.key,)
        yield name + "o_proj.bias", (hidden,)


def read_latent(config: LatentConfig, heads: int, scale: float, source: Source) -> LatentAttention:
    """A layer's attention; every tensor of `latent_tensors` is there, in its shape."""

    def tensor(name: str) -> Tensor:
        return source.tensor(f"self_attn.{name}")

    entry = "q_a_proj" if config.query_rank else "q_proj"
    queries = tensor(entry + ".weight")
    last = None
    if config.query_rank:
        last = tensor("q_b_proj.weight")
    spread = queries if last is None else last
    if config.interleaved:
        spread = _half_split(spread, heads, config.rope)
    latents = tensor("kv_a_proj_with_mqa.weight")
    bias = None
    if config.bias:
        first = tensor(entry + ".bias") if config.query_rank else queries.new_zeros(len(queries))
        bias = torch.cat((first, tensor("kv_a_proj_with_mqa.bias")))
    if config.interleaved:
        latents = _half_split(latents, 1, config.rope)
        if bias is not None:
            bias[-config.key :] = _half_split(bias[-config.key :, None], 1, config.rope)[:, 0]
    both = tensor("kv_b_proj.weight").view(heads, config.nope + config.value, config.kv_rank)
    keys, values = both.split_with_sizes([config.nope, config.value], 1)
    return LatentAttention(
        config,
        heads,
        Linear(torch.cat((spread if last is None else queries, latents)), bias),
        None if last is None else RMSNorm(tensor("q_a_layernorm.weight"), EPS),
        None if last is None else Linear(spread),
        RMSNorm(tensor("kv_a_layernorm.weight"), EPS),
        HeadMaps(keys.transpose(1, 2)),
        HeadMaps(values),
        Linear(tensor("o_proj.weight"), tensor("o_proj.bias") if config.bias else None),
        scale,
    )


def _half_split(weight: Tensor, heads: int, rope: int) -> Tensor:
    """Rows of heads whose last `rope` are pairs side by side, so that they are two halves."""
    split = weight.view(heads, -1, weight.shape[-1])
    pairs = torch.arange(split.shape[1] - rope, split.shape[1]).view(-1, 2)
    order = torch.cat((torch.arange(split.shape[1] - rope), pairs[:, 0], pairs[:, 1]))
    return split[:, order.to(weight.device)].reshape(weight.shape)
