"""What a GGUF file's model is called elsewhere: metadata to config.json, tensor names to HF names.

`translate` reads the header only (and `rope_freqs`, a few hundred bytes). Knows the architectures
llama, qwen2, qwen3 and gemma3 and what their converters do to the tensors: rows of q and k
interleaved (llama), norms with 1 added (gemma3); mixtures are target/gguf_experts.py's. Knows
nothing of blocks of quantised data, and refuses what it can't place rather than run another model
than the file holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from spec_serve.target.dequant import SUPPORTED
from spec_serve.target.gguf import CheckpointError, GGUFFile, TensorInfo
from spec_serve.target.gguf_experts import CLASSES, expert_parts, experts_config

END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<end_of_turn>")
"""Tokens that end a turn wherever they exist; files name one of possibly several."""

_CONTROL, _USER_DEFINED = 3, 4
_HF_CLASSES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    **{arch: names for arch, names in CLASSES.items() if arch != "llama"},
}
_OUTER = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
_BLOCKS = {
    "llama": _BLOCK,
    "qwen2": _BLOCK,
    "qwen3": {**_BLOCK, **_QK_NORMS},
    "qwen2moe": _BLOCK,
    "qwen3moe": {**_BLOCK, **_QK_NORMS},
    "gemma3": {
        **_BLOCK,
        **_QK_NORMS,
        "post_attention_norm": "post_attention_layernorm",
        "ffn_norm": "pre_feedforward_layernorm",
        "post_ffw_norm": "post_feedforward_layernorm",
    },
}
# Keys that would change the function computed and have no place in config.json: neutral values.
_NEUTRAL: dict[str, object] = {
    "embedding_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
    "attention.clamp_kqv": 0.0,
    "attention.max_alibi_bias": 0.0,
    "attention.causal": True,
    "use_parallel_residual": False,
}
GEMMA3_27B_LAYERS = 62
"""The one Gemma 3 that scales attention by hidden / heads and not by head_dim, as llama.cpp tells
it apart: the format does not say."""


@dataclass(frozen=True, slots=True)
class Stored:
    """How a Hugging Face tensor is stored.

    interleaved: number of heads whose rows are in the order of llama.cpp's RoPE, 0 = none. shift:
    what must be added to each value.
    """

    info: TensorInfo
    interleaved: int = 0
    shift: float = 0.0


@dataclass(frozen=True, slots=True)
class Translation:
    """config: in the form of a config.json. tensors: HF name -> where and how it is stored."""

    config: dict[str, Any]
    tensors: dict[str, Stored]


class _Metadata:
    """Typed access to the keys of one architecture; errors name the key."""

    def __init__(self, file: GGUFFile, arch: str) -> None:
        self.file = file
        self.arch = arch

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self.file.path}: {reason}")

    def raw(self, key: str) -> Any:
        return self.file.metadata.get(f"{self.arch}.{key}")

    def scalar(self, key: str) -> Any:
        value = self.raw(key)
        if isinstance(value, (list, np.ndarray)):
            raise self.fail(f"{self.arch}.{key}: a single value is expected, not an array")
        return value

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; an array (one per layer) must repeat a single one."""
        value = self.raw(key)
        if value is None:
            if default is None:
                raise self.fail(f"{self.arch}.{key}: missing from the metadata")
            return default
        if isinstance(value, np.ndarray):
            kinds = np.unique(value).tolist()
            if len(kinds) != 1:
                raise self.fail(f"{self.arch}.{key}: layers that differ are not supported")
            value = kinds[0]
        if type(value) is not int or value < 1:
            raise self.fail(f"{self.arch}.{key}: {value!r} is not a positive whole number")
        return value

    def real(self, key: str, default: float | None = None) -> float | None:
        """A positive number. What was written as 1e-6 in float32 reads as 1e-6."""
        value = self.scalar(key)
        if value is None:
            return default
        if type(value) not in (int, float) or not math.isfinite(value) or value <= 0:
            raise self.fail(f"{self.arch}.{key}: {value!r} is not a positive number")
        if abs(value) > np.finfo(np.float32).max:
            raise self.fail(f"{self.arch}.{key}: {value!r} is too large")
        short = np.float32(value)
        return float(str(short)) if float(short) == value else float(value)

    def token(self, name: str, rows: int) -> int | None:
        key = f"tokenizer.ggml.{name}_token_id"
        value = self.file.metadata.get(key)
        if value is None:
            return None
        if type(value) is not int:
            raise self.fail(f"{key}: {value!r} is not a token id")
        # All ones is how some converters write "none".
        return value if 0 <= value < rows else None


def translate(file: GGUFFile, read_floats: Callable[[TensorInfo], list[float]]) -> Translation:
    """Config and tensors of a GGUF model under the names of Hugging Face checkpoints.

    read_floats: reads a small tensor's values. Raises CheckpointError naming an architecture, type,
    key or tensor that is not supported.
    """
    arch = file.metadata.get("general.architecture")
    if not isinstance(arch, str) or arch not in _HF_CLASSES:
        raise CheckpointError(
            f"{file.path}: general.architecture: {arch!r} is not supported; "
            f"supported: {', '.join(_HF_CLASSES)}"
        )
    metadata = _Metadata(file, arch)
    parts = file.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise metadata.fail("one part of a model split over several files; merge them first")
    for info in file.tensors:
        if info.type not in SUPPORTED:
            raise metadata.fail(
                f"{info.type} in tensor {info.name} is not supported; "
                f"supported: {', '.join(SUPPORTED)}"
            )
    for key, neutral in _NEUTRAL.items():
        value = metadata.scalar(key)
        if value not in (None, neutral):
            raise metadata.fail(f"{arch}.{key}: {value!r} is not supported")
    layers = metadata.count("block_count")
    spare = metadata.scalar("nextn_predict_layers")
    if type(spare) is int and 0 < spare < layers:
        # They count as blocks, but are the file's own drafts.
        layers -= spare
    config = _config(metadata, layers)
    extra = {info.name: info for info in file.tensors if info.name == "rope_freqs.weight"}
    if extra:
        divisors = read_floats(extra["rope_freqs.weight"])
        config["rope_scaling"] = _with_divisors(metadata, config, divisors)
    return Translation(config, _tensors(metadata, config, layers))


def _config(metadata: _Metadata, layers: int) -> dict[str, Any]:
    arch = metadata.arch
    shapes = {info.name: info.shape for info in metadata.file.tensors}
    embedding = shapes.get("token_embd.weight", ())
    if len(embedding) != 2:
        raise metadata.fail("token_embd.weight: missing or not a matrix; a file without a model?")
    rows = embedding[0]
    hidden, heads = metadata.count("embedding_length"), metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(1, hidden // heads))
    for key in ("attention.value_length", "rope.dimension_count"):
        if metadata.count(key, head_dim) != head_dim:
            raise metadata.fail(
                f"{arch}.{key}: {metadata.raw(key)} differs from the head's {head_dim}, "
                "which is not supported"
            )
    architecture, model_type = _HF_CLASSES[arch]
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": rows,
        "hidden_size": hidden,
        "intermediate_size": metadata.count("feed_forward_length"),
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": metadata.count("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": metadata.real("attention.layer_norm_rms_epsilon", 1e-6),
        "rope_theta": metadata.real("rope.freq_base", 1e6 if arch == "gemma3" else 1e4),
        "rope_scaling": _rope_scaling(metadata),
        "max_position_embeddings": metadata.count("context_length"),
        "tie_word_embeddings": "output.weight" not in shapes,
        "hidden_act": "silu",
        "bos_token_id": metadata.token("bos", rows),
        "eos_token_id": _ends(metadata, rows),
        "pad_token_id": metadata.token("padding", rows),
    }
    if arch not in ("qwen2", "qwen2moe"):
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
    if arch == "llama":
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
        window = metadata.scalar("attention.sliding_window")
        if window:
            config.update(
                architectures=["MistralForCausalLM"],
                model_type="mistral",
                sliding_window=metadata.count("attention.sliding_window"),
            )
    elif arch == "gemma3":
        config.update(_gemma3(metadata, config))
    config.update(experts_config(metadata, shapes, layers))
    return config


def _gemma3(metadata: _Metadata, config: dict[str, Any]) -> dict[str, Any]:
    layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    scale = metadata.real("attention.scale")
    if scale is not None:
        scalar = scale**-2
    elif layers == GEMMA3_27B_LAYERS:
        scalar = config["hidden_size"] / config["num_attention_heads"]
    else:
        scalar = head_dim
    own: dict[str, Any] = {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": scalar,
        "sliding_window": metadata.count("attention.sliding_window", 4096),
        "rope_local_base_freq": metadata.real("rope.freq_base_swa", 1e4),
        "final_logit_softcapping": metadata.real("final_logit_softcapping"),
        "attn_logit_softcapping": metadata.real("attn_logit_softcapping"),
    }
    pattern = metadata.raw("attention.sliding_window_pattern")
    if isinstance(pattern, np.ndarray):
        if len(pattern) < layers:
            raise metadata.fail(
                f"{metadata.arch}.attention.sliding_window_pattern: {len(pattern)} entries for "
                f"{layers} layers"
            )
        own["layer_types"] = [
            "sliding_attention" if local else "full_attention" for local in pattern[:layers]
        ]
    else:
        own["sliding_window_pattern"] = metadata.count("attention.sliding_window_pattern", 6)
    return own


def _rope_scaling(metadata: _Metadata) -> dict[str, Any] | None:
    """The metadata's scaling; `rope.scale_linear` is what early files called a linear factor."""
    kind = metadata.scalar("rope.scaling.type")
    factor = metadata.real("rope.scaling.factor") or metadata.real("rope.scale_linear")
    if kind is None:
        kind = "none" if factor in (None, 1.0) else "linear"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise metadata.fail(
            f"{metadata.arch}.rope.scaling.type: {kind!r} is not supported; "
            "supported: none, linear, yarn"
        )
    if factor is None:
        raise metadata.fail(f"{metadata.arch}.rope.scaling.factor: missing from the metadata")
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "linear":
        return scaling
    context = metadata.count("context_length")
    scaling["original_max_position_embeddings"] = metadata.count(
        "rope.scaling.original_context_length", context
    )
    for key, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        value = metadata.real(f"rope.scaling.{key}")
        if value is not None:
            scaling[ours] = value
    own = metadata.real("rope.scaling.yarn_attn_factor") or metadata.real(
        "rope.scaling.attn_factor"
    )
    if own not in (None, 1.0):
        # There it multiplies the usual temperature; in config.json it replaces it.
        scaling["attention_factor"] = own * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return scaling


def _with_divisors(
    metadata: _Metadata, config: dict[str, Any], divisors: list[float]
) -> dict[str, Any]:
    """`rope_freqs`: what Llama 3.1 and later divide the frequencies by."""
    if len(divisors) != config["head_dim"] // 2:
        raise metadata.fail(
            f"rope_freqs.weight: {len(divisors)} values for heads of {config['head_dim']}"
        )
    if not all(math.isfinite(d) and d > 0 for d in divisors):
        raise metadata.fail("rope_freqs.weight: holds values that are not positive numbers")
    scaling = config["rope_scaling"]
    if scaling is not None:
        if scaling["rope_type"] != "linear":
            raise metadata.fail("rope_freqs.weight: not supported together with yarn")
        divisors = [d * scaling["factor"] for d in divisors]
    return {"rope_type": "freqs", "divisors": divisors}


def _ends(metadata: _Metadata, rows: int) -> list[int]:
    """Ids that end a turn: those declared, then those known by their text."""
    declared = [metadata.token(name, rows) for name in ("eos", "eot", "eom")]
    ends = [token for token in declared if token is not None]
    tokens = metadata.file.metadata.get("tokenizer.ggml.tokens")
    kinds = metadata.file.metadata.get("tokenizer.ggml.token_type")
    if isinstance(tokens, list) and isinstance(kinds, np.ndarray) and len(tokens) == len(kinds):
        for text in END_TOKENS:
            if text in tokens:
                token = tokens.index(text)
                if kinds[token] in (_CONTROL, _USER_DEFINED) and token < rows:
                    ends.append(token)
    return list(dict.fromkeys(ends))


def _tensors(metadata: _Metadata, config: dict[str, Any], layers: int) -> dict[str, Stored]:
    """Every tensor the model needs under its HF name."""
    arch = metadata.arch
    blocks = _BLOCKS[arch]
    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors: dict[str, Stored] = {}
    for info in metadata.file.tensors:
        stem, _, ending = info.name.rpartition(".")
        parts = stem.split(".", 2)
        if info.name == "rope_freqs.weight" or "nextn" in info.name or "rot_embd" in info.name:
            continue
        if len(parts) == 3 and parts[0] == "blk" and parts[1].isdecimal() and len(parts[1]) < 7:
            if int(parts[1]) >= layers:
                continue
            split = expert_parts(metadata, config, parts[2], info)
            if split is not None:
                layer = f"model.layers.{int(parts[1])}."
                held = {f"{layer}{below}.{ending}": Stored(part) for below, part in split.items()}
                if ending != "weight" or held.keys() & tensors.keys():
                    raise metadata.fail(f"tensor {info.name!r} has no place in a mixture")
                tensors.update(held)
                continue
            where = blocks.get(parts[2])
            name = where and f"model.layers.{int(parts[1])}.{where}"
        else:
            name = _OUTER.get(stem)
        if name is None or ending not in ("weight", "bias") or f"{name}.{ending}" in tensors:
            raise metadata.fail(f"tensor {info.name!r} has no place in architecture {arch!r}")
        interleaved = heads.get(parts[-1], 0) if arch == "llama" else 0
        if interleaved and info.shape[0] != interleaved * config["head_dim"]:
            raise metadata.fail(
                f"tensor {info.name!r}: {info.shape[0]} rows for {interleaved} heads of "
                f"{config['head_dim']}"
            )
        shift = -1.0 if arch == "gemma3" and stem.endswith("norm") else 0.0
        tensors[f"{name}.{ending}"] = Stored(info, interleaved, shift)
    return tensors
