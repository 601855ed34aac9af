"""The one module behind EAGLE-1, EAGLE-2, EAGLE-3, P-EAGLE and NEXTN heads: pairs in, logits out.

A pair is a token's embedding and the target's feature of the position before it. How the two are
normed, joined, and what is fed back are options of `HeadConfig` and which tensors are there; the
equations are those of the published heads (Li et al. 2024, arXiv 2401.15077, and 2025, 2503.01840;
DeepSeek-V3, 2412.19437, section 2.2). Knows no trees and no growth (draft/feature.py).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.head_file import HeadError, HeadFile
from spec_serve.kernels.base import AttentionPlan
from spec_serve.kernels.grouped import pick_grouped
from spec_serve.target.config import ModelConfig
from spec_serve.target.experts import read_mixture
from spec_serve.target.latent import LatentAttention, read_latent
from spec_serve.target.layers import MLP, Attention, FeedForward, Linear, RMSNorm, activation
from spec_serve.target.model import Transformer, Weights, kv_spec, layout
from spec_serve.target.rope import Rotary, Rotation, rotate


@dataclass(frozen=True, slots=True)
class TargetParts:
    """What heads borrow of their target.

    embedding: [V, H], unscaled. head: [M, H] after the final norm -> logits [M, V] float32. norm:
    the final norm.
    """

    config: ModelConfig
    embedding: Tensor
    head: Callable[[Tensor], Tensor]
    norm: RMSNorm

    @classmethod
    def of(cls, model: Transformer) -> TargetParts:
        """Those of a loaded model; nothing is copied."""
        return cls(model.config, model.embedding, model.head, model.norm)

    @classmethod
    def read(cls, weights: Weights, dtype: torch.dtype, head: bool = True) -> TargetParts:
        """Those of a checkpoint whose model keeps its weights to itself; head: is it needed?

        Such weights are quantised: half precision holds the embedding as well as `dtype` does.
        """
        config = ModelConfig.from_checkpoint_config(weights.config)
        found = layout(weights, config)
        table = found.prefix + "embed_tokens.weight"
        embedding = weights.tensor(table, torch.float16)
        norm = weights.tensor(found.prefix + "norm.weight", dtype)

        def missing(hidden: Tensor) -> Tensor:
            raise AssertionError("the target's head was not read")

        run = missing
        if head:
            linear = Linear(weights.tensor(found.head or table, dtype))
            cap = config.logit_softcap

            def run(hidden: Tensor) -> Tensor:
                logits = linear(hidden).float()
                return logits if cap is None else torch.tanh(logits / cap) * cap

        return cls(config, embedding, run, RMSNorm(norm, config.eps, config.zero_centred))


@dataclass(frozen=True, slots=True)
class PartialAttention:
    """Attention of which only the first channels of a head are rotated (as many as the rotation
    has) and, with `gate`, every output is scaled by a sigmoid of it (Qwen3-Next)."""

    inner: Attention
    gate: Linear | None

    def __call__(self, x: Tensor, rotation: Rotation, kv: LayerKV, plan: AttentionPlan) -> Tensor:
        """x: [N, in] -> [N, H]."""
        inner = self.inner
        heads, kv_heads, rotary = inner.heads, inner.kv_heads, rotation[0].shape[-1]
        y = inner.qkv(x).view(-1, heads + 2 * kv_heads, inner.head_dim)
        qk, v = y.split_with_sizes([heads + kv_heads, kv_heads], 1)
        if inner.q_norm is not None and inner.k_norm is not None:
            q, k = qk.split_with_sizes([heads, kv_heads], 1)
            qk = torch.cat((inner.q_norm(q), inner.k_norm(k)), 1)
        qk = torch.cat((rotate(qk[..., :rotary], rotation), qk[..., rotary:]), -1)
        q, k = qk.split_with_sizes([heads, kv_heads], 1)
        mixed = plan.attend(q, k, v, kv, scale=inner.scale)  # [N, heads, D]
        mixed = mixed.reshape(x.shape[0], -1)
        return inner.out(mixed if self.gate is None else mixed * torch.sigmoid(self.gate(x)))


@dataclass(frozen=True, slots=True)
class Layer:
    """A decoder layer whose attention may read something wider than the residual stream."""

    attention_norm: RMSNorm | None
    attention: Attention | PartialAttention | LatentAttention
    mlp_norm: RMSNorm
    mlp: FeedForward

    def read(self, x: Tensor) -> Tensor:
        """What attention reads of x [N, H] unless something else is given to it."""
        return x if self.attention_norm is None else self.attention_norm(x)

    def note(self, read: Tensor, rotation: Rotation, kv: LayerKV, slots: Tensor) -> None:
        """K and V alone of what attention reads [N, in], written to `slots` [N]."""
        attention = self.attention
        if isinstance(attention, LatentAttention):
            attention.note(read, rotation, kv, slots)
            return
        inner = attention.inner if isinstance(attention, PartialAttention) else attention
        heads, kv_heads, turned = inner.heads, inner.kv_heads, rotation[0].shape[-1]
        y = inner.qkv(read).view(-1, heads + 2 * kv_heads, inner.head_dim)
        k, v = y[:, heads:].split_with_sizes([kv_heads, kv_heads], 1)
        if inner.k_norm is not None:
            k = inner.k_norm(k)
        k = torch.cat((rotate(k[..., :turned], rotation), k[..., turned:]), -1)
        kv.k.index_copy_(0, slots, k)
        kv.v.index_copy_(0, slots, v)

    def __call__(
        self,
        x: Tensor,
        read: Tensor | None,
        rotation: Rotation,
        kv: LayerKV,
        plan: AttentionPlan,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """x: [N, H]; read: what attention reads instead of it, [N, 2H]; wanted: [M] rows that are
        returned, None = all."""
        if read is None:
            read = self.read(x)
        x = x + self.attention(read, rotation, kv, plan)
        if wanted is not None:
            x = x.index_select(0, wanted)
        return x.add_(self.mlp(self.mlp_norm(x)))


class FeatureHead:
    """A loaded head. `config`: its HeadConfig. ids: target id of each draft id, None = the same."""

    def __init__(
        self,
        file: HeadFile,
        target: TargetParts,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ) -> None:
        config = self.config = file.config
        block = config.block
        self.dtype, self.device = dtype, torch.device(device)
        self._target = target
        parts = Parts(file, dtype, self.device)
        self.vocab = target.config.vocab  # ids at and beyond it must not be proposed
        self.ids = checked_ids(file, self.vocab, self.device)
        self._fuse = parts.linear("fuse")
        self._fuse_norm = parts.norm("fuse_norm.weight")
        self._fuse_norms = [
            norm
            for i in range(len(config.taps))
            if (norm := parts.norm(f"fuse_norms.{i}.weight")) is not None
        ]
        self._embed_norm = parts.norm("embed_norm.weight")
        self._feature_norm = parts.norm("feature_norm.weight")
        self._join = parts.linear("join")
        self._norm = parts.norm("norm.weight")
        self._head = parts.linear("lm_head")
        self._embedding = target.embedding
        if file.has("embed_tokens.weight"):
            self._embedding = parts.tensor("embed_tokens.weight")
        self._layers = [parts.layer(i) for i in range(block.layers)]
        self._rotary = Rotary(block.rope, config.rotary or block.rotary, dtype, self.device)
        self.kv_specs: tuple[KVSpec, ...] = (kv_spec(block, dtype),) * block.layers
        self.mask_feature: Tensor | None = None  # [1, H]
        if file.has("mask_hidden"):
            self.mask_feature = self._fused(parts.tensor("mask_hidden").view(1, -1))

    @property
    def owns_head(self) -> bool:
        """False if logits are made by the target's head."""
        return self._head is not None

    def feature(self, taps: Tensor) -> Tensor:
        """[N, taps * Ht] of the target -> [N, H], what a pair's feature half is made of."""
        taps = taps.to(self.dtype)
        if self.config.final_norm:
            taps = self._target.norm(taps).to(self.dtype)
        return self._fused(taps)

    def _fused(self, taps: Tensor) -> Tensor:
        if self._fuse_norm is not None:
            taps = self._fuse_norm(taps)
        if self._fuse_norms:
            thirds = taps.chunk(len(self._fuse_norms), -1)
            taps = torch.cat(
                [norm(part) for norm, part in zip(self._fuse_norms, thirds, strict=True)], -1
            )
        return taps if self._fuse is None else self._fuse(taps)

    def _enter(self, tokens: Tensor, feature: Tensor) -> tuple[Tensor, Tensor | None]:
        """The residual stream [N, H], and what the first layer's attention reads if not that."""
        # An id the embedding lacks is fed as id 0: it costs acceptance only.
        inside = torch.where(tokens < self._embedding.shape[0], tokens, 0)
        token = F.embedding(inside, self._embedding).to(self.dtype)
        if self._embed_norm is not None:
            token = self._embed_norm(token)
        normed = feature if self._feature_norm is None else self._feature_norm(feature)
        pair = torch.cat((normed, token) if self.config.hidden_first else (token, normed), -1)
        if self._join is not None:
            return self._join(pair), None
        return (normed if self.config.normed_residual else feature), pair

    def run(
        self,
        batch: TreeBatch,
        feature: Tensor,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        wanted: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Run pairs: feature [N, H] belongs to the position before each of the batch's tokens.

        Returns (what the head reads [M, H], what is fed back [M, H]) of the nodes `wanted` [M],
        None = all. K/V are written to `layers` at batch.slots. Rotation is by the token's own
        position: only differences count.
        """
        x, read = self._enter(batch.tokens, feature)
        rotation = self._rotary.at(batch.positions)
        for i, (layer, kv) in enumerate(zip(self._layers, layers, strict=True), 1):
            x = layer(x, read, rotation, kv, plan, wanted if i == len(self._layers) else None)
            read = None
        normed = x if self._norm is None else self._norm(x)
        return normed, normed if self.config.feedback == "normed" else x

    def note(
        self,
        batch: TreeBatch,
        feature: Tensor,
        layers: Sequence[LayerKV],
        plan: Callable[[], AttentionPlan],
    ) -> None:
        """The K/V of pairs, as `run` writes them, without what only answers need.

        plan: made if there is more than one layer.
        """
        x, read = self._enter(batch.tokens, feature)
        rotation = self._rotary.at(batch.positions)
        if len(self._layers) > 1:
            attending = plan()
            for layer, kv in zip(self._layers[:-1], layers, strict=False):
                x = layer(x, read, rotation, kv, attending)
                read = None
        last = self._layers[-1]
        last.note(last.read(x) if read is None else read, rotation, layers[-1], batch.slots)

    def logits(self, hidden: Tensor) -> Tensor:
        """[M, H] -> [M, draft vocabulary] float32, never an id the target lacks."""
        made = self._target.head(hidden) if self._head is None else self._head(hidden).float()
        return made if self.ids is not None else made[:, : self.vocab]


def checked_ids(file: HeadFile, vocab: int, device: torch.device) -> Tensor | None:
    """A head's table of target ids, all below `vocab`; None = draft ids are the target's."""
    ids = file.ids()
    if ids is not None and int(ids[-1]) >= vocab:
        raise HeadError(
            f"d2t: reaches id {int(ids[-1])}, the target has {vocab} tokens; the head was made for"
            " another model"
        )
    return None if ids is None else ids.to(device)


class Parts:
    """Reads a head's tensors by role into the pieces a module is made of."""

    def __init__(self, file: HeadFile, dtype: torch.dtype, device: torch.device) -> None:
        self._file, self._dtype, self._device = file, dtype, device

    def tensor(self, role: str, dtype: torch.dtype | None = None) -> Tensor:
        """The tensor of a role."""
        return self._file.tensor(role, dtype or self._dtype).to(self._device)

    def norm(self, role: str) -> RMSNorm | None:
        """The norm of a role, if there is one."""
        if not self._file.has(role):
            return None
        block = self._file.config.block
        return RMSNorm(self.tensor(role).view(-1), block.eps, block.zero_centred)

    def needed(self, role: str) -> RMSNorm:
        """A norm that was checked to be there."""
        norm = self.norm(role)
        assert norm is not None, role
        return norm

    def linear(self, role: str) -> Linear | None:
        """The linear map of a role, if there is one."""
        if not self._file.has(f"{role}.weight"):
            return None
        bias = self.tensor(f"{role}.bias") if self._file.has(f"{role}.bias") else None
        return Linear(self.tensor(f"{role}.weight"), bias)

    def stacked(self, layer: str, names: Sequence[str], bias: bool) -> Linear:
        """Linear maps of one input, one below the other."""
        weight = torch.cat([self.tensor(f"{layer}{name}.weight") for name in names])
        biases = [self.tensor(f"{layer}{name}.bias") for name in names] if bias else None
        return Linear(weight, None if biases is None else torch.cat(biases))

    def layer(self, i: int) -> Layer:
        """Decoder layer i."""
        config, block, name = self._file.config, self._file.config.block, f"layers.{i}."
        after = self.needed(name + "post_attention_layernorm.weight")
        attention: Attention | PartialAttention | LatentAttention
        if block.latent is not None:
            below = _Below(self, name)
            attention = read_latent(block.latent, block.heads, block.attention_scale, below)
        elif config.gated:
            attention = self._gated(name)
        elif 0 < config.rotary < block.head_dim:
            attention = PartialAttention(self._attention(name), None)
        else:
            attention = self._attention(name)
        before = self.norm(name + "input_layernorm.weight")
        mlp: FeedForward
        if block.experts is not None and block.experts.layers[i]:
            below, act = _Below(self, name), activation(block.activation)
            mlp = read_mixture(block.experts, below, act, pick_grouped(self._device))
        else:
            mlp = self.mlp(name)
        return Layer(before, attention, after, mlp)

    def mlp(self, layer: str) -> MLP:
        """The gated MLP of a layer."""
        block = self._file.config.block
        return MLP(
            self.stacked(layer, ("mlp.gate_proj", "mlp.up_proj"), block.mlp_bias),
            self.stacked(layer, ("mlp.down_proj",), block.mlp_bias),
            activation(block.activation),
        )

    def _attention(self, layer: str, qkv: Linear | None = None) -> Attention:
        block = self._file.config.block
        names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        return Attention(
            qkv=qkv or self.stacked(layer, names, block.qkv_bias),
            out=self.stacked(layer, ("self_attn.o_proj",), block.o_bias),
            heads=block.heads,
            kv_heads=block.kv_heads,
            head_dim=block.head_dim,
            scale=block.attention_scale,
            q_norm=self.norm(layer + "self_attn.q_norm.weight"),
            k_norm=self.norm(layer + "self_attn.k_norm.weight"),
        )

    def _gated(self, layer: str) -> PartialAttention:
        """q_proj's rows are, head by head, a query and a gate."""
        block = self._file.config.block
        both = self.tensor(layer + "self_attn.q_proj.weight")
        query, gate = both.view(block.heads, 2, block.head_dim, -1).unbind(1)
        k, v = (self.tensor(f"{layer}self_attn.{name}_proj.weight") for name in "kv")
        inputs = both.shape[1]
        qkv = Linear(torch.cat((query.reshape(-1, inputs), k, v)))
        return PartialAttention(self._attention(layer, qkv), Linear(gate.reshape(-1, inputs)))


@dataclass(frozen=True, slots=True)
class _Below:
    """One layer's tensors, by their names below it."""

    parts: Parts
    layer: str

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.parts.tensor(self.layer + name, dtype)
