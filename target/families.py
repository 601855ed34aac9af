"""One recipe per architecture: how its config.json departs from the plain Llama block.

A recipe reads the family's own keys and returns overrides of `ModelConfig` fields; what every
family shares (sizes, RoPE, norms) is read in target/config.py. Knows nothing of tensors. A new
architecture whose block `target/model.py` can already express is one more recipe here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from spec_serve.target.fields import Raw
from spec_serve.target.sparse import (
    deepseek_experts,
    latent_attention,
    mixtral_experts,
    qwen_experts,
)


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


def _qwen2_moe(raw: Raw, layers: int) -> dict[str, Any]:
    """Qwen2's attention; mixtures with a gated expert for all."""
    windows = _upper_windows(raw, layers)
    if raw.get("layer_types") is None and raw.get("use_sliding_window"):
        # Here, unlike in Qwen2, every other layer below `max_window_layers` slides.
        first = raw.get("max_window_layers", 28)
        kinds = [i % 2 == 0 and i < first for i in range(layers)]
        windows = tuple(raw.get("sliding_window") if slides else None for slides in kinds)
    return {
        "qkv_bias": bool(raw.get("qkv_bias", True)),
        "windows": windows,
        "experts": qwen_experts(raw, layers, shared=True),
    }


def _qwen3_moe(raw: Raw, layers: int) -> dict[str, Any]:
    """Qwen3's attention; mixtures without an expert for all."""
    window = raw.get("sliding_window") if raw.get("use_sliding_window") else None
    return {
        **_qwen3(raw, layers),
        "head_dim": raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"],
        "windows": (window,) * layers,
        "experts": qwen_experts(raw, layers, shared=False),
    }


def _mixtral(raw: Raw, layers: int) -> dict[str, Any]:
    """Mistral's attention; a mixture in every layer."""
    return {**_mistral(raw, layers), "experts": mixtral_experts(raw, layers)}


def _deepseek2(raw: Raw, layers: int) -> dict[str, Any]:
    """Latent attention; dense layers first, then mixtures with softmax routing."""
    bias = bool(raw.get("mlp_bias", False))
    return {
        **_latent(raw, interleaved=True),
        "mlp_bias": bias,
        "experts": deepseek_experts(raw, layers, third=False),
    }


def _deepseek3(raw: Raw, layers: int) -> dict[str, Any]:
    """As DeepSeek-V2, with sigmoid routing and a bias per expert that balances their load."""
    return {
        **_latent(raw, interleaved=bool(raw.get("rope_interleave", True))),
        "experts": deepseek_experts(raw, layers, third=True),
    }


def _latent(raw: Raw, interleaved: bool) -> dict[str, Any]:
    latent = latent_attention(raw, interleaved)
    given = {**(raw.get("rope_scaling") or {}), **(raw.get("rope_parameters") or {})}
    # YaRN's temperature acts on the rotated channels only, so all of the score is scaled besides.
    factor, weight = float(given.get("factor") or 1.0), float(given.get("mscale_all_dim") or 0.0)
    scaled = given.get("rope_type") or given.get("type") or "default"
    temperature = 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
    dim = latent.nope + latent.rope
    return {
        "latent": latent,
        "head_dim": dim,
        "attention_scale": dim**-0.5 * (temperature**2 if scaled != "default" else 1.0),
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
    Family("qwen2-moe", ("Qwen2MoeForCausalLM",), ("qwen2_moe",), _qwen2_moe),
    Family("qwen3-moe", ("Qwen3MoeForCausalLM",), ("qwen3_moe",), _qwen3_moe),
    Family("mixtral", ("MixtralForCausalLM",), ("mixtral",), _mixtral),
    Family("deepseek-v2", ("DeepseekV2ForCausalLM",), ("deepseek_v2",), _deepseek2),
    # Also what Moonlight and Kimi K2 are stored as.
    Family("deepseek-v3", ("DeepseekV3ForCausalLM",), ("deepseek_v3", "kimi_k2"), _deepseek3),
    Family(
        "gemma3",
        ("Gemma3ForCausalLM", "Gemma3ForConditionalGeneration"),
        ("gemma3_text", "gemma3"),
        _gemma3,
    ),
)
