"""Mixtures of experts in GGUF files: metadata to config.json's keys, stacked tensors to experts.

Knows how Mixtral (as llama), Qwen2-MoE and Qwen3-MoE are stored; what would route otherwise than
those is refused. A stacked tensor's experts lie one behind the other, so each is a part of the
file. Knows nothing of blocks of quantised data.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from spec_serve.target.gguf import CheckpointError, TensorInfo

CLASSES = {
    "llama": ("MixtralForCausalLM", "mixtral"),
    "qwen2moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
}
_NORMALISED = {"llama": True, "qwen2moe": False, "qwen3moe": True}
_EXPERT = {
    "llama": ("block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}),
    "qwen2moe": ("mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}),
}
_EXPERT["qwen3moe"] = _EXPERT["qwen2moe"]
# Keys that would change how experts are chosen or weighted: the values that change nothing.
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "expert_weights_scale": (None, 0.0, 1.0),
    "expert_gating_func": (None, 0, 1),  # softmax
    "expert_group_count": (None, 0, 1),
    "expert_group_used_count": (None, 0, 1),
    "expert_group_scale": (None, 0.0, 1.0),
    "leading_dense_block_count": (None, 0),
    "moe_every_n_layers": (None, 0, 1),
}


class Metadata(Protocol):
    """Typed access to the keys of one architecture (target/gguf_model.py)."""

    arch: str

    def fail(self, reason: str) -> CheckpointError: ...
    def scalar(self, key: str) -> Any: ...
    def count(self, key: str, default: int | None = None) -> int: ...


def experts_config(metadata: Metadata, names: Iterable[str], layers: int) -> dict[str, Any]:
    """Keys of config.json that differ for a mixture; {} = the file holds none."""
    arch = metadata.arch
    if not metadata.scalar("expert_count"):
        if arch in ("qwen2moe", "qwen3moe"):
            raise metadata.fail(f"{arch}.expert_count: missing from the metadata")
        return {}
    experts = metadata.count("expert_count")
    held = set(names)
    mixtures = [i for i in range(layers) if f"blk.{i}.ffn_gate_inp.weight" in held]
    if arch not in CLASSES or not mixtures:
        raise metadata.fail(f"{arch}.expert_count: {experts} is not supported")
    for key, neutral in _NEUTRAL.items():
        value = metadata.scalar(key)
        if value not in neutral:
            raise metadata.fail(f"{arch}.{key}: {value!r} is not supported")
    architecture, model_type = CLASSES[arch]
    normalised = metadata.scalar("expert_weights_norm")
    if arch == "llama" and (normalised is False or len(mixtures) < layers):
        raise metadata.fail("llama: mixtures other than Mixtral's are not supported")
    own: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "num_local_experts" if arch == "llama" else "num_experts": experts,
        "num_experts_per_tok": metadata.count("expert_used_count"),
        "norm_topk_prob": _NORMALISED[arch] if normalised is None else bool(normalised),
    }
    if arch == "llama":
        return own
    own["moe_intermediate_size"] = metadata.count("expert_feed_forward_length")
    own["mlp_only_layers"] = [i for i in range(layers) if i not in mixtures]
    if arch == "qwen2moe":
        own["shared_expert_intermediate_size"] = metadata.count("expert_shared_feed_forward_length")
        own["qkv_bias"] = "blk.0.attn_q.bias" in held
    return own


def expert_parts(
    metadata: Metadata, config: Mapping[str, Any], place: str, info: TensorInfo
) -> dict[str, TensorInfo] | None:
    """Where the tensors in one of a layer's tensors lie, by Hugging Face's names below the layer;
    None = it is no part of a mixture. place: its name below the block, without the ending."""
    experts = config.get("num_local_experts") or config.get("num_experts")
    if not experts:
        return None
    block, names = _EXPERT[metadata.arch]
    if place == "ffn_gate_inp":
        return {f"{block}.gate": info}
    if place == "ffn_gate_inp_shexp":
        return {"mlp.shared_expert_gate": replace(info, shape=(1, *info.shape[-1:]))}
    stem, _, number = place.partition(".")
    role, _, kind = stem.removeprefix("ffn_").partition("_")
    if not place.startswith("ffn_") or role not in names:
        return None
    if number.isdecimal() and not kind:
        return {f"{block}.experts.{int(number)}.{names[role]}": info}
    if kind == "shexp":
        return {f"mlp.shared_expert.{role}_proj": info}
    if kind != "exps":
        return None
    if len(info.shape) != 3 or info.shape[0] != experts or info.nbytes % experts:
        raise metadata.fail(
            f"tensor {info.name!r}: has shape {list(info.shape)}, {experts} experts are expected"
        )
    size = info.nbytes // experts
    return {
        f"{block}.experts.{e}.{names[role]}": replace(
            info, shape=info.shape[1:], offset=info.offset + e * size, nbytes=size
        )
        for e in range(experts)
    }
