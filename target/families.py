"""One recipe per architecture: how its config.json departs from the plain Llama block.

A recipe reads the family's own keys and returns overrides of `ModelConfig` fields; what every
family shares (sizes, RoPE, norms) is read in target/config.py. Knows nothing of tensors. A new
architecture whose block `target/model.py` can already express is one more recipe here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Raw = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Family:
    """A group of checkpoints with one block.

    architectures, model_types: the values of config.json's keys that name it. read: config.json ->
    overrides of `ModelConfig` fields, called with the number of layers.
    """

    name: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    read: Callable[[Raw, int], dict[str, Any]]


def _llama(raw: Raw, layers: int) -> dict[str, Any]:
    """Llama 2 and 3, SmolLM2 and everything that uses their block."""
    bias = bool(raw.get("attention_bias", False))
    return {"qkv_bias": bias, "o_bias": bias, "mlp_bias": bool(raw.get("mlp_bias", False))}


def _mistral(raw: Raw, layers: int) -> dict[str, Any]:
    """Llama's block; an optional sliding window in every layer."""
    return {"windows": (raw.get("sliding_window"),) * layers}


def _qwen2(raw: Raw, layers: int) -> dict[str, Any]:
    """Biases on q, k and v; layers from `max_window_layers` on may slide."""
    return {"qkv_bias": True, "windows": _upper_windows(raw, layers)}


def _qwen3(raw: Raw, layers: int) -> dict[str, Any]:
    """Norms on q and k instead of biases; head_dim is independent of the hidden size."""
    bias = bool(raw.get("attention_bias", False))
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "windows": _upper_windows(raw, layers),
        "head_dim": raw.get("head_dim") or 128,
    }


def _gemma3(raw: Raw, layers: int) -> dict[str, Any]:
    """Norms before and after attention and MLP, (1 + w) norms, local and global layers."""
    bias = bool(raw.get("attention_bias", False))
    window = raw.get("sliding_window") or 4096
    every = raw.get("sliding_window_pattern") or raw.get("_sliding_window_pattern") or 6
    kinds = raw.get("layer_types") or [
        "full_attention" if (i + 1) % every == 0 else "sliding_attention" for i in range(layers)
    ]
    return {
        "qkv_bias": bias,
        "o_bias": bias,
        "qk_norm": True,
        "zero_centred": True,
        "sandwich_norms": True,
        "head_dim": raw.get("head_dim") or 256,
        "windows": tuple(window if kind == "sliding_attention" else None for kind in kinds),
        "embed_scale": math.sqrt(raw["hidden_size"]),
        "attention_scale": (raw.get("query_pre_attn_scalar") or 256) ** -0.5,
        "attention_softcap": raw.get("attn_logit_softcapping"),
        "logit_softcap": raw.get("final_logit_softcapping"),
        "activation": raw.get("hidden_activation") or "gelu_pytorch_tanh",
    }


def _upper_windows(raw: Raw, layers: int) -> tuple[int | None, ...]:
    """Qwen's rule: with `use_sliding_window`, layers from `max_window_layers` on slide."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    kinds = raw.get("layer_types")
    if kinds is not None:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = raw.get("max_window_layers", 28)
    return tuple(window if i >= first else None for i in range(layers))


FAMILIES: tuple[Family, ...] = (
    Family("llama", ("LlamaForCausalLM",), ("llama",), _llama),
    Family("mistral", ("MistralForCausalLM",), ("mistral",), _mistral),
    Family("qwen2", ("Qwen2ForCausalLM",), ("qwen2",), _qwen2),
    # Qwen2's block; what follows its layers in a checkpoint are NEXTN modules (draft/nextn.py).
    Family("mimo", ("MiMoForCausalLM",), ("mimo",), _qwen2),
    Family("qwen3", ("Qwen3ForCausalLM",), ("qwen3",), _qwen3),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
        _gemma3,
    ),
)
