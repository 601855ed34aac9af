"""What a drafting head is, whatever its format: sizes, equations as options, tensors by role.

A format's module (eagle.py, eagle3.py, nextn.py) recognises a checkpoint and says which tensor
plays which role; here names are unified and every shape is checked before anything is read. Knows
no arithmetic (draft/head.py) and no engine.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import torch
from torch import Tensor

from spec_serve.target.config import ConfigError, ModelConfig
from spec_serve.target.experts import expert_tensors
from spec_serve.target.latent import latent_tensors
from spec_serve.target.model import Weights

Raw = Mapping[str, Any]

LATENT_TYPES = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""model_type of configurations whose layers have latent attention."""


class HeadError(ConfigError):
    """A head is incomplete, contradictory, not supported, or made for another model."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """A head that reads hidden states of its target, pair by pair (token, feature before it).

    format: eagle, eagle3, nextn, p-eagle, dflash or dspark. block: sizes of its decoder layers;
    block.hidden is H, block.vocab the rows of its embedding, block.layers their number.
    target_hidden: Ht. taps: target boundaries it reads, in order. final_norm: the tap goes through
    the target's final norm.
    draft_vocab: rows of its head. hidden_first: the feature half of a pair comes first.
    normed_residual: the residual stream of a head without `join` begins at the normed feature.
    feedback: what is fed back while drafting, the layers' output or that after `norm`.
    mask_token: the token of slots that stand for what is not known yet. gated: attention
    has an output gate, its q rows are query and gate by turns of a head. rotary: channels of a
    head that are rotated. block_size: positions answered in one pass, 0 = one;
    anchor_predicts: the first of them is the newest token's own answer.
    """

    format: str
    block: ModelConfig
    target_hidden: int
    taps: tuple[int, ...]
    draft_vocab: int
    final_norm: bool = False
    hidden_first: bool = False
    normed_residual: bool = False
    feedback: Literal["plain", "normed"] = "plain"
    mask_token: int | None = None
    gated: bool = False
    rotary: int = 0
    block_size: int = 0
    anchor_predicts: bool = False


@runtime_checkable
class ReadsTaps(Protocol):
    """A drafter made of a head. taps may be set to other boundaries, as many as there are."""

    taps: tuple[int, ...]

    @property
    def config(self) -> HeadConfig: ...


@dataclass(frozen=True, slots=True)
class HeadFile:
    """A checked head on disk: `names` maps roles to the checkpoint's tensors.

    Roles: fuse.weight/bias [H, taps * Ht], fuse_norm.weight [taps * Ht], fuse_norms.{i}.weight
    [Ht], embed_norm.weight and feature_norm.weight [H], join.weight/bias [H, 2H], layers.{i}. with
    Hugging Face's names of a decoder layer (q, k and v of layer 0 are 2H wide without `join`),
    norm.weight [H], lm_head.weight [draft_vocab, H], embed_tokens.weight [V, H], d2t [draft_vocab],
    mask_hidden, markov_w1.weight [V, r] and markov_w2.weight [draft_vocab, r]. What is missing does
    not take part or is the target's.
    """

    config: HeadConfig
    names: Mapping[str, str]
    weights: Weights

    def has(self, role: str) -> bool:
        """Whether the head has a tensor of its own for a role."""
        return role in self.names

    def tensor(self, role: str, dtype: torch.dtype) -> Tensor:
        """The tensor playing a role, read into `dtype`."""
        return self.weights.tensor(self.names[role], dtype)

    def ids(self) -> Tensor | None:
        """[draft_vocab] target id of each draft id, int64, ascending; None = the same.

        Raises HeadError for a table that does not hold offsets or is at odds with t2d.
        """
        if "d2t" not in self.names:
            return None
        offsets = self.weights.tensor(self.names["d2t"], torch.int64)
        ids = offsets + torch.arange(len(offsets))
        if len(ids) and (int(offsets[0]) < 0 or bool((offsets.diff() < 0).any())):
            raise HeadError(
                "d2t: does not hold offsets (target id - draft id), which never fall;"
                " absolute ids or a damaged file"
            )
        if len(ids) and int(ids[-1]) >= self.config.block.vocab:
            raise HeadError(
                f"d2t: reaches id {int(ids[-1])} of a vocabulary of {self.config.block.vocab};"
                " absolute ids where offsets are expected, or another model's head"
            )
        if "t2d" in self.names:
            kept = self.weights.tensor(self.names["t2d"], torch.bool).nonzero().view(-1)
            if kept.shape != ids.shape or not torch.equal(kept, ids):
                raise HeadError("d2t: names other ids than t2d does")
        return ids


def block_config(raw: Raw, layers: int, defaults: Raw | None = None) -> ModelConfig:
    """Sizes of a head's decoder layers from a config.json's content; Llama's block unless Qwen3's.

    Missing rope_theta is 10000, never the target's. Biases and norms on q and k are decided by the
    tensors that are there.
    """
    family = "Qwen3ForCausalLM" if raw.get("model_type") == "qwen3" else "LlamaForCausalLM"
    plain = {
        "max_position_embeddings": 2048,
        **(defaults or {}),
        **{key: value for key, value in raw.items() if value is not None},
        "architectures": [family],
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
    }
    if plain.get("model_type") == "llama4_text" and "intermediate_size_mlp" in plain:
        plain["intermediate_size"] = plain["intermediate_size_mlp"]
    for key in ("layer_types", "use_sliding_window", "quantization_config"):
        plain.pop(key, None)
    # A context given for training only is no limit, and decides nothing without scaling.
    return ModelConfig.from_checkpoint_config(plain)


def sparse_block_config(raw: Raw, layers: int, mixture: bool) -> ModelConfig | None:
    """Sizes of decoder layers with latent attention; None = the configuration is not DeepSeek's.

    mixture: their MLPs are mixtures of experts.
    """
    if raw.get("model_type") not in LATENT_TYPES:
        return None
    plain = {
        **raw,
        "architectures": None,
        "num_hidden_layers": layers,
        "tie_word_embeddings": False,
        "first_k_dense_replace": 0,
        "moe_layer_freq": 1,
    }
    plain.pop("quantization_config", None)
    block = ModelConfig.from_checkpoint_config(plain)
    return block if mixture else replace(block, experts=None)


def strip(names: Iterable[str], prefixes: tuple[str, ...]) -> dict[str, str]:
    """Role-like name -> name in the file, without the first of `prefixes` that fits."""
    found: dict[str, str] = {}
    for name in names:
        prefix = next((p for p in prefixes if name.startswith(p)), "")
        found[name.removeprefix(prefix)] = name
    return found


def layers_in(names: Iterable[str]) -> int:
    """How many layers `layers.{i}.` there are, by the highest i."""
    numbers = [int(m[1]) for name in names if (m := re.match(r"layers\.(\d+)\.", name))]
    return max(numbers, default=-1) + 1


def with_presence(block: ModelConfig, names: Iterable[str]) -> ModelConfig:
    """`block` with biases and q/k norms as the tensors of its first layer have them."""
    held = set(names)
    attention = "layers.0.self_attn."
    return replace(
        block,
        qkv_bias=f"{attention}q_proj.bias" in held,
        o_bias=f"{attention}o_proj.bias" in held,
        mlp_bias="layers.0.mlp.gate_proj.bias" in held,
        qk_norm=f"{attention}q_norm.weight" in held,
    )


def checked(file: HeadFile) -> HeadFile:
    """The file itself, if everything its equations need is there in the right shape."""
    config = file.config
    shapes = _shapes(file)
    for role, shape in shapes.items():
        if role not in file.names:
            raise HeadError(f"{role}: missing from the head's checkpoint ({config.format})")
        found = tuple(file.weights.shape(file.names[role]))
        if found != shape and _size(found) != _size(shape):
            raise HeadError(
                f"{file.names[role]}: has shape {list(found)}, the head's configuration asks for"
                f" {list(shape)}"
            )
    return file


def _size(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _shapes(file: HeadFile) -> dict[str, tuple[int, ...]]:
    config, block = file.config, file.config.block
    hidden, inner, dim = block.hidden, block.intermediate, block.head_dim
    q, kv = block.heads * dim * (2 if config.gated else 1), block.kv_heads * dim
    wide = len(config.taps) * config.target_hidden
    shapes: dict[str, tuple[int, ...]] = {}
    optional: dict[str, tuple[int, ...]] = {
        "fuse.weight": (hidden, wide),
        "fuse.bias": (hidden,),
        "fuse_norm.weight": (wide,),
        **{f"fuse_norms.{i}.weight": (config.target_hidden,) for i in range(len(config.taps))},
        "embed_norm.weight": (hidden,),
        "feature_norm.weight": (hidden,),
        "join.weight": (hidden, 2 * hidden),
        "join.bias": (hidden,),
        "norm.weight": (hidden,),
        "lm_head.weight": (config.draft_vocab, hidden),
        "embed_tokens.weight": (block.vocab, hidden),
        "d2t": (config.draft_vocab,),
        "t2d": (block.vocab,),
        "mask_hidden": (wide,),
    }
    if file.has("markov_w1.weight"):
        rank = int(file.weights.shape(file.names["markov_w1.weight"])[-1])
        optional["markov_w1.weight"] = (block.vocab, rank)
        optional["markov_w2.weight"] = (config.draft_vocab, rank)
    shapes.update({role: shape for role, shape in optional.items() if file.has(role)})
    for i in range(block.layers):
        layer = f"layers.{i}."
        inputs = hidden if i or config.block_size or file.has("join.weight") else 2 * hidden
        shapes[layer + "post_attention_layernorm.weight"] = (hidden,)
        if file.has(layer + "input_layernorm.weight") or i:
            shapes[layer + "input_layernorm.weight"] = (hidden,)
        if block.qk_norm:
            shapes[layer + "self_attn.q_norm.weight"] = (dim,)
            shapes[layer + "self_attn.k_norm.weight"] = (dim,)
        if block.latent is not None:
            tensors = latent_tensors(block.latent, block.heads, hidden)
            shapes.update({layer + name: shape for name, shape in tensors})
        mixture = block.experts is not None and block.experts.layers[i]
        if mixture and block.experts is not None:
            tensors = expert_tensors(block.experts, hidden)
            shapes.update({layer + name: shape for name, shape in tensors})
        for name, rows, columns, bias in (
            ("self_attn.q_proj", q, inputs, block.qkv_bias),
            ("self_attn.k_proj", kv, inputs, block.qkv_bias),
            ("self_attn.v_proj", kv, inputs, block.qkv_bias),
            ("self_attn.o_proj", hidden, block.heads * dim, block.o_bias),
            ("mlp.gate_proj", inner, hidden, block.mlp_bias),
            ("mlp.up_proj", inner, hidden, block.mlp_bias),
            ("mlp.down_proj", hidden, inner, block.mlp_bias),
        ):
            if mixture if name.startswith("mlp.") else block.latent is not None:
                continue
            shapes[f"{layer}{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{layer}{name}.bias"] = (rows,)
    return shapes
