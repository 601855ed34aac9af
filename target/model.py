"""The one transformer: maps a batch of token trees to logits and tapped hidden states.

`load_model` checks a checkpoint against its configuration and streams the weights in, one tensor at
a time. Knows blocks and tensor names; not which architecture it runs (target/families.py), how
attention is computed (kernels/) or what the logits are for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.kernels.base import AttentionPlan
from spec_serve.kernels.grouped import pick_grouped
from spec_serve.target.config import ConfigError, ModelConfig
from spec_serve.target.experts import expert_tensors, read_mixture
from spec_serve.target.latent import latent_tensors, read_latent
from spec_serve.target.layers import (
    MLP,
    Attention,
    Block,
    FeedForward,
    Linear,
    RMSNorm,
    SelfAttention,
    activation,
)
from spec_serve.target.operations import Operations, TorchOperations, fits_triton
from spec_serve.target.quantised_checkpoint import QuantisedCheckpoint
from spec_serve.target.rope import Rotary

PREFIXES = ("model.", "", "model.language_model.", "language_model.model.")
"""Where the layers may stand in a checkpoint's names."""

Progress = Callable[[int, int], None]
"""Called with (elements loaded, elements in all)."""


class Weights(Protocol):
    """The part of a checkpoint that loading needs (target/weights.py)."""

    @property
    def config(self) -> Mapping[str, Any]: ...
    def names(self) -> Iterable[str]: ...
    def shape(self, name: str) -> Sequence[int]: ...
    def tensor(self, name: str, dtype: torch.dtype) -> Tensor: ...


@dataclass(slots=True)
class TargetOut:
    """What a forward returns.

    logits: [M, V] float32 at batch.logits_at. taps: [N, T * H], the asked boundaries side by side,
    or None. hidden: [M, H] after the final norm, what the head reads.
    """

    logits: Tensor
    taps: Tensor | None
    hidden: Tensor


class Model(Protocol):
    """What steps need of a model: this module's `Transformer`, or compiled code."""

    config: ModelConfig
    device: torch.device

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]: ...

    @property
    def precision(self) -> str: ...

    def forward(
        self,
        batch: TreeBatch,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: tuple[int, ...] = (),
    ) -> TargetOut: ...


class Transformer:
    """A decoder-only transformer in eager torch, for inference only.

    embedding: [V, H]. Boundary b, 0..L, is the residual stream after b layers, before any norm.
    operations: what runs the blocks; an engine sets the device's (target/operations.py).
    """

    def __init__(
        self,
        config: ModelConfig,
        embedding: Tensor,
        blocks: Sequence[Block],
        norm: RMSNorm,
        head: Linear,
        dtype: torch.dtype,
    ) -> None:
        self.config = config
        self.embedding = embedding
        self.blocks = tuple(blocks)
        self.norm = norm
        self.lm_head = head
        self.dtype = dtype
        self.device = embedding.device
        self.operations: Operations = TorchOperations()
        self.held = ""  # the quantisation that matrices are held in
        # Rounded to the model's dtype, because the models were trained with the rounded factor.
        self._embed_scale = float(torch.tensor(config.embed_scale, dtype=dtype))
        self._rotary = Rotary(config.rope, config.rotary, dtype, self.device)
        self._local_rotary = (
            None
            if config.local_rope is None
            else Rotary(config.local_rope, config.rotary, dtype, self.device)
        )

    @property
    def kv_specs(self) -> tuple[KVSpec, ...]:
        """K/V each layer keeps per token."""
        return (kv_spec(self.config, self.dtype),) * self.config.layers

    @property
    def precision(self) -> str:
        """What the weights are, for people."""
        plain = str(self.dtype).removeprefix("torch.")
        return f"{self.held}, {plain}" if self.held else plain

    def embed(self, tokens: Tensor) -> Tensor:
        """tokens [N] -> [N, H], scaled as the model's first layer expects it."""
        x = F.embedding(tokens, self.embedding).to(self.dtype)
        return x if self._embed_scale == 1.0 else x * self._embed_scale

    def head(self, hidden: Tensor) -> Tensor:
        """hidden [M, H] after the final norm -> logits [M, V] float32."""
        logits = self.lm_head(hidden).float()
        cap = self.config.logit_softcap
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def forward(
        self,
        batch: TreeBatch,
        layers: Sequence[LayerKV],
        plan: AttentionPlan,
        taps: tuple[int, ...] = (),
    ) -> TargetOut:
        """Run a batch, writing the nodes' K/V into `layers` (one per block) at batch.slots.

        taps: boundaries wanted, in the order in which they are returned; ValueError outside 0..L.
        """
        config = self.config
        for tap in taps:
            if not 0 <= tap <= config.layers:
                raise ValueError(f"taps: boundary {tap} is outside 0..{config.layers}")
        with torch.inference_mode():
            x = self.embed(batch.tokens)  # [N, H]
            nodes = x.shape[0]
            padding = self.blocks[0].attention.rows(nodes) - nodes
            if padding:  # once here instead of in every linear map
                x = F.pad(x, (0, 0, 0, padding))
            rotation = self._rotary.at(batch.positions)
            local = rotation
            if self._local_rotary is not None:
                local = self._local_rotary.at(batch.positions)
            x, tapped = self.operations.through(self.blocks, x, rotation, local, layers, plan, taps)
            features = torch.cat([tapped[tap][:nodes] for tap in taps], -1) if taps else None
            hidden = self.operations.norm(self.norm, x.index_select(0, batch.logits_at))  # [M, H]
            return TargetOut(self.head(hidden), features, hidden)


class _Reader:
    """Reads a checkpoint's tensors under names and shapes that were checked beforehand."""

    def __init__(
        self,
        weights: Weights,
        prefix: str,
        dtype: torch.dtype,
        device: torch.device,
        keep: bool,
    ) -> None:
        self._weights = weights
        self._dtype = dtype
        self.device = device
        self._progress: Progress | None = None
        self._total = self._done = 0
        self.prefix = prefix
        self.keep = keep

    def report_to(self, progress: Progress | None, total: int) -> None:
        self._progress, self._total = progress, total

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        held = self._weights.tensor(name, dtype or self._dtype).to(self.device)
        self._count(held.numel())
        return held

    def stacked(self, names: Sequence[str], sizes: Sequence[int], *rest: int) -> Tensor:
        """Tensors of `sizes` rows one below the other, each read straight into its place."""
        out = torch.empty(sum(sizes), *rest, dtype=self._dtype, device=self.device)
        for name, part in zip(names, out.split_with_sizes(list(sizes)), strict=True):
            part.copy_(self._weights.tensor(name, self._dtype))
            self._count(part.numel())
        return out

    def quantised(self, names: Sequence[str], bias: Tensor | None) -> Linear | None:
        """Matrices one below the other as the checkpoint has them; None if they are to be plain."""
        if not self.keep or not isinstance(self._weights, QuantisedCheckpoint):
            return None
        from spec_serve.target.linears import quantised_linear  # needs Triton

        parts = [self._weights.codes(name, self.device) for name in names]
        made = quantised_linear(parts, bias, self._dtype)
        if made is not None:
            self._count(made.outputs * made.inputs)
        return made

    def _count(self, elements: int) -> None:
        self._done += elements
        if self._progress is not None:
            self._progress(self._done, self._total)


@dataclass(frozen=True, slots=True)
class _Below:
    """One layer's tensors, by their names below it."""

    reader: _Reader
    layer: str

    def tensor(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        return self.reader.tensor(self.layer + name, dtype)


def expected_tensors(config: ModelConfig, prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Every tensor a checkpoint must hold: (name, shape); the head is left to the caller."""
    hidden, inner, dim = config.hidden, config.intermediate, config.head_dim
    q, kv = config.heads * dim, config.kv_heads * dim
    yield prefix + "embed_tokens.weight", (config.vocab, hidden)
    yield prefix + "norm.weight", (hidden,)
    norms = ["input_layernorm", "post_attention_layernorm"]
    if config.sandwich_norms:
        norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    attention = (
        ("self_attn.q_proj", q, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, q, config.o_bias),
    )
    mlp = (
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for i in range(config.layers):
        layer = f"{prefix}layers.{i}."
        for name in norms:
            yield f"{layer}{name}.weight", (hidden,)
        if config.qk_norm:
            yield layer + "self_attn.q_norm.weight", (dim,)
            yield layer + "self_attn.k_norm.weight", (dim,)
        mixture = config.experts is not None and config.experts.layers[i]
        for name, outputs, inputs, bias in (
            *(() if config.latent else attention),
            *(() if mixture else mlp),
        ):
            yield f"{layer}{name}.weight", (outputs, inputs)
            if bias:
                yield f"{layer}{name}.bias", (outputs,)
        if config.latent is not None:
            for name, shape in latent_tensors(config.latent, config.heads, hidden):
                yield layer + name, shape
        if mixture and config.experts is not None:
            for name, shape in expert_tensors(config.experts, hidden):
                yield layer + name, shape


def kv_spec(config: ModelConfig, dtype: torch.dtype) -> KVSpec:
    """What a layer of the model keeps per token."""
    if config.latent is not None:
        return KVSpec(1, config.latent.key, dtype, config.latent.kv_rank)
    return KVSpec(config.kv_heads, config.head_dim, dtype)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where a checkpoint's tensors stand. head: None = tied to the embedding."""

    prefix: str
    head: str | None
    shapes: dict[str, tuple[int, ...]]


def layout(weights: Weights, config: ModelConfig) -> Layout:
    """Every tensor that is needed, checked by name and shape; ConfigError names the one at fault.

    A file that ships an `lm_head` although its configuration ties it to the embedding is followed.
    """
    names = set(weights.names())
    prefix = next((p for p in PREFIXES if p + "embed_tokens.weight" in names), PREFIXES[0])
    heads = ("lm_head.weight", "language_model.lm_head.weight", prefix + "lm_head.weight")
    head = next((name for name in heads if name in names), None)
    if head is None and not config.tied_head:
        raise ConfigError(
            "lm_head.weight: missing from the checkpoint (tie_word_embeddings: false)"
        )
    shapes = dict(expected_tensors(config, prefix))
    if head is not None:
        shapes[head] = (config.vocab, config.hidden)
    for name, shape in shapes.items():
        if name not in names:
            raise ConfigError(f"{name}: missing from the checkpoint")
        found = tuple(weights.shape(name))
        if found != shape:
            raise ConfigError(
                f"{name}: has shape {list(found)}, the configuration asks for {list(shape)}"
            )
    return Layout(prefix, head, shapes)


def _read_block(config: ModelConfig, reader: _Reader, i: int) -> Block:
    layer = f"{reader.prefix}layers.{i}."
    below = _Below(reader, layer)
    hidden, dim = config.hidden, config.head_dim
    q, kv = config.heads * dim, config.kv_heads * dim

    def norm(name: str) -> RMSNorm:
        weight = reader.tensor(f"{layer}{name}.weight")
        return RMSNorm(weight, config.eps, config.zero_centred)

    def linear(names: Sequence[str], sizes: Sequence[int], inputs: int, bias: bool) -> Linear:
        weights = [f"{layer}{name}.weight" for name in names]
        biases = [f"{layer}{name}.bias" for name in names]
        offset = reader.stacked(biases, sizes) if bias else None
        held = reader.quantised(weights, offset)
        if held is not None:
            return held
        weight = reader.stacked(weights, sizes, inputs)
        return Linear(weight, offset)

    def plain_attention() -> Attention:
        return Attention(
            qkv=linear(
                ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
                (q, kv, kv),
                hidden,
                config.qkv_bias,
            ),
            out=linear(("self_attn.o_proj",), (hidden,), q, config.o_bias),
            heads=config.heads,
            kv_heads=config.kv_heads,
            head_dim=dim,
            scale=config.attention_scale,
            window=config.windows[i],
            softcap=config.attention_softcap,
            q_norm=norm("self_attn.q_norm") if config.qk_norm else None,
            k_norm=norm("self_attn.k_norm") if config.qk_norm else None,
        )

    attention: SelfAttention
    if config.latent is not None:
        attention = read_latent(config.latent, config.heads, config.attention_scale, below)
    else:
        attention = plain_attention()
    inner = config.intermediate
    act = activation(config.activation)
    mlp: FeedForward
    if config.experts is not None and config.experts.layers[i]:
        mlp = read_mixture(config.experts, below, act, pick_grouped(reader.device))
    else:
        mlp = MLP(
            linear(("mlp.gate_proj", "mlp.up_proj"), (inner, inner), hidden, config.mlp_bias),
            linear(("mlp.down_proj",), (hidden,), inner, config.mlp_bias),
            act,
        )
    after = "post_attention_layernorm"
    if not config.sandwich_norms:
        return Block(norm("input_layernorm"), attention, norm(after), mlp)
    return Block(
        norm("input_layernorm"),
        attention,
        norm("pre_feedforward_layernorm"),
        mlp,
        norm(after),
        norm("post_feedforward_layernorm"),
    )


def load_model(
    checkpoint: Weights,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    progress: Progress | None = None,
    keep: bool | None = None,
) -> Transformer:
    """Build the model a checkpoint describes.

    keep: hold quantised matrices as they are, for Triton's kernels; None = on NVIDIA GPUs in half
    precision. Elsewhere they are multiplied out as they are read.

    All names and shapes are checked before a tensor is read; ConfigError names the one at fault.
    Tensors the model does not use (rotary buffers, vision towers) are left unread.
    """
    config = ModelConfig.from_checkpoint_config(checkpoint.config)
    device = torch.device(device)
    found = layout(checkpoint, config)
    head_name = found.head
    if keep is None:
        keep = fits_triton(device) and dtype != torch.float32
    reader = _Reader(checkpoint, found.prefix, dtype, device, keep)
    reader.report_to(progress, sum(torch.Size(shape).numel() for shape in found.shapes.values()))
    with torch.inference_mode():
        # The largest tensor first: what making the head takes in passing is free again by the time
        # the blocks come.
        embedding = reader.tensor(reader.prefix + "embed_tokens.weight")
        head = None if head_name is None else reader.quantised([head_name], None)
        if head is None:
            head = Linear(embedding if head_name is None else reader.tensor(head_name))
        if head_name is None and dtype == torch.float32:
            embedding = _narrowed(embedding)
        norm = RMSNorm(
            reader.tensor(reader.prefix + "norm.weight"), config.eps, config.zero_centred
        )
        blocks = [_read_block(config, reader, i) for i in range(config.layers)]
        made = Transformer(config, embedding, blocks, norm, head, dtype)
        if keep and isinstance(checkpoint, QuantisedCheckpoint):
            made.held = checkpoint.scheme.method
        return made


def _narrowed(embedding: Tensor) -> Tensor:
    """The embedding in bfloat16 if that loses nothing.

    A tied head in a layout of its own means a second copy; most checkpoints are bfloat16, and
    half of that copy is then zeros.
    """
    half = embedding.to(torch.bfloat16)
    same = all(
        torch.equal(few.to(embedding.dtype), wanted)
        for few, wanted in zip(half.chunk(16), embedding.chunk(16), strict=True)
    )
    return half if same else embedding
