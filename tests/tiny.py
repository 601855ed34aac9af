"""Tiny models and a tiny tokenizer, built in memory: what the other tests run on.

Weights are random but scaled so that logits differ clearly (standard deviation 2 to 4), configs
are config.json dicts as Hugging Face writes them, and the tokenizer is byte-level with a few
merges and ChatML's special tokens. Imported by tests only.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from spec_serve.target.config import ModelConfig
from spec_serve.target.model import Transformer, expected_tensors, load_model

FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma3")
SPARSE = ("qwen2-moe", "qwen3-moe", "mixtral", "deepseek-v2", "deepseek-v3")
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
MERGES = (("t", "h"), ("th", "e"), ("i", "n"), ("a", "n"), ("Ġ", "the"), ("e", "r"), ("o", "n"))
VOCAB = 300  # 256 bytes, 7 merges, 3 special tokens and some rows no text uses, as in real models
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "llama"),
    "mistral": ("MistralForCausalLM", "mistral"),
    "qwen2": ("Qwen2ForCausalLM", "qwen2"),
    "qwen3": ("Qwen3ForCausalLM", "qwen3"),
    "gemma3": ("Gemma3ForCausalLM", "gemma3_text"),
    "qwen2-moe": ("Qwen2MoeForCausalLM", "qwen2_moe"),
    "qwen3-moe": ("Qwen3MoeForCausalLM", "qwen3_moe"),
    "mixtral": ("MixtralForCausalLM", "mixtral"),
    "deepseek-v2": ("DeepseekV2ForCausalLM", "deepseek_v2"),
    "deepseek-v3": ("DeepseekV3ForCausalLM", "deepseek_v3"),
}
_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4, "head_dim": 8, "q_lora_rank": 24, "kv_lora_rank": 16,
    "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12, "n_routed_experts": 8,
    "num_experts_per_tok": 3, "moe_intermediate_size": 32, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5,
}  # fmt: skip
_OWN: dict[str, dict[str, Any]] = {
    "qwen2-moe": {
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3-moe": {
        "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {"num_local_experts": 5, "num_experts_per_tok": 2},
    "deepseek-v2": {**_DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek-v3": {**_DEEPSEEK, "norm_topk_prob": True},
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class MemoryCheckpoint:
    """A checkpoint held in memory, with the protocol of target/weights.py."""

    config: dict[str, Any]
    tensors: Mapping[str, Tensor]

    def names(self) -> list[str]:
        return list(self.tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        return self.tensors[name].to(dtype, copy=True)

    def kind(self, name: str) -> str:
        return "F32"


def tiny_config(family: str = "llama", **overrides: Any) -> dict[str, Any]:
    """A config.json dict: 3 layers (4 for gemma3), hidden 64, 4 heads over 2 K/V heads of 16."""
    architecture, model_type = _ARCHITECTURES[family]
    specials = {token: VOCAB - len(SPECIALS) + i for i, token in enumerate(SPECIALS)}
    config: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": False,
        "hidden_act": "silu",
        "bos_token_id": None,
        "eos_token_id": [specials["<|im_end|>"], specials["<|endoftext|>"]],
        "pad_token_id": specials["<|endoftext|>"],
        "torch_dtype": "float32",
    }
    if family == "gemma3":
        config.update(
            num_hidden_layers=4,
            tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh",
            query_pre_attn_scalar=16,
            sliding_window=8,
            layer_types=["sliding_attention"] * 2 + ["full_attention", "sliding_attention"],
            rope_theta=1_000_000.0,
            rope_local_base_freq=10000.0,
        )
    return {**config, **_OWN.get(family, {}), **overrides}


def tiny_checkpoint(family: str = "llama", seed: int = 0, **overrides: Any) -> MemoryCheckpoint:
    """Random float32 weights for `tiny_config(...)`; another seed is an unrelated model."""
    raw = tiny_config(family, **overrides)
    config = ModelConfig.from_checkpoint_config(raw)
    generator = torch.Generator().manual_seed(seed)
    # The final norm makes the hidden state's entries about 1, so this is the logits' deviation.
    spread = 3.0
    centre = 0.0 if config.zero_centred else 1.0
    # A tied head would predict each token to follow itself if the layers added too little to it.
    boost = 8.0 if config.tied_head else 1.0
    expected = list(expected_tensors(config, "model."))
    if not config.tied_head:
        expected.append(("lm_head.weight", (config.vocab, config.hidden)))
    tensors = {}
    for name, shape in expected:
        noise = torch.randn(shape, generator=generator)
        if name.endswith("norm.weight"):
            tensors[name] = centre + 0.1 * noise
            if config.sandwich_norms and ".post_" in name:
                tensors[name] += boost
        elif name.endswith(".bias"):
            tensors[name] = 0.1 * noise
        elif name == "lm_head.weight" or (config.tied_head and "embed_tokens" in name):
            tensors[name] = noise * spread / config.hidden**0.5
        elif "embed_tokens" in name:
            tensors[name] = noise
        else:
            adds = name.endswith(("o_proj.weight", "down_proj.weight"))
            tensors[name] = noise * (boost if adds else 1.0) / shape[-1] ** 0.5
    return MemoryCheckpoint(raw, tensors)


def tiny_model(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    **overrides: Any,
) -> Transformer:
    """`tiny_checkpoint` loaded."""
    return load_model(tiny_checkpoint(family, seed, **overrides), dtype, device)


def noisy_copy(checkpoint: MemoryCheckpoint, scale: float = 0.1, seed: int = 1) -> MemoryCheckpoint:
    """A model that often agrees with the given one: each matrix gets noise of `scale` x its own
    deviation."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {
        name: held + scale * held.std() * torch.randn(held.shape, generator=generator)
        if held.ndim == 2
        else held
        for name, held in checkpoint.tensors.items()
    }
    return MemoryCheckpoint(checkpoint.config, tensors)


def tiny_tokenizer() -> Tokenizer:
    """Byte-level BPE: 256 bytes, a few merges, ChatML's special tokens at the end of VOCAB."""
    vocab = {symbol: i for i, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    for left, right in MERGES:
        vocab[left + right] = len(vocab)
    last = VOCAB - len(SPECIALS)
    # BPE wants a contiguous vocabulary: the rows no text uses get names no text contains.
    for i in range(len(vocab), last):
        vocab[f"<unused{i}>"] = i
    for i, token in enumerate(SPECIALS):
        vocab[token] = last + i
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(MERGES)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIALS))
    return tokenizer


def write_tiny_model_dir(
    path: Path | str, family: str = "llama", seed: int = 0, **overrides: Any
) -> Path:
    """A model directory as found on a hub: config, weights, tokenizer with a ChatML template."""
    from safetensors.torch import save_file

    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    checkpoint = tiny_checkpoint(family, seed, **overrides)
    (path / "config.json").write_text(json.dumps(checkpoint.config, indent=1))
    save_file(dict(checkpoint.tensors), path / "model.safetensors", {"format": "pt"})
    tiny_tokenizer().save(str(path / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "clean_up_tokenization_spaces": False,
        "model_max_length": checkpoint.config["max_position_embeddings"],
        "chat_template": CHATML,
    }
    (path / "tokenizer_config.json").write_text(json.dumps(settings, indent=1))
    return path
