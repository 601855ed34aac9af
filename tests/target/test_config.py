"""config.json as it is written in the wild: both generations of the file, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import pytest
import torch

from spec_serve.target.config import ConfigError, ModelConfig, RopeConfig
from spec_serve.target.rope import Rotary, inverse_frequencies, rotate
from tests.late import Late
from tests.tiny import FAMILIES, tiny_config

transformers = Late("transformers")
rope_utils = Late("transformers.modeling_rope_utils")

LLAMA3 = {
    "factor": 32.0,
    "high_freq_factor": 4.0,
    "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
}


def read(family: str = "llama", **overrides: Any) -> ModelConfig:
    return ModelConfig.from_checkpoint_config(tiny_config(family, **overrides))


def without(raw: dict[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in raw.items() if key not in keys}


@pytest.mark.parametrize("family", FAMILIES)
def test_transformers_writes_and_we_read(family: str) -> None:
    """The file transformers 5 writes for a model says the same as the older one."""
    raw = without(tiny_config(family, sliding_window=8), "torch_dtype")
    written = json.loads(transformers.AutoConfig.for_model(**raw).to_json_string(use_diff=False))
    assert "rope_parameters" in written and "rope_theta" not in written
    assert ModelConfig.from_checkpoint_config(written) == ModelConfig.from_checkpoint_config(raw)


def test_llama_fields() -> None:
    config = read(rope_theta=130000.0, eos_token_id=2, attention_bias=True, head_dim=None)
    assert (config.family, config.vocab, config.hidden, config.layers) == ("llama", 300, 64, 3)
    assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 16)
    assert config.rope == RopeConfig(130000.0) and config.local_rope is None
    assert config.attention_scale == 0.25 and config.embed_scale == 1.0
    assert config.qkv_bias and config.o_bias and not config.mlp_bias and not config.qk_norm
    assert config.eos == (2,) and config.windows == (None,) * 3 and config.max_context == 1024
    assert read(eos_token_id=[5, 7]).eos == (5, 7) and read(eos_token_id=None).eos == ()
    assert read(num_key_value_heads=None).kv_heads == 4
    assert not dataclasses.replace(config).tied_head and hash(config)


def test_defaults_of_keys_that_old_files_lack() -> None:
    raw = without(tiny_config(), "rope_theta", "head_dim", "tie_word_embeddings", "hidden_act")
    config = ModelConfig.from_checkpoint_config(raw)
    assert config.rope.theta == 10000.0 and config.activation == "silu" and not config.tied_head
    gemma = without(
        tiny_config("gemma3", sliding_window_pattern=3),
        *("rope_theta", "rope_local_base_freq", "tie_word_embeddings", "layer_types", "head_dim"),
    )
    config = ModelConfig.from_checkpoint_config(gemma)
    assert config.rope.theta == 1e6 and config.tied_head and config.head_dim == 256
    assert config.local_rope == RopeConfig(10000.0)
    assert config.windows == (8, 8, None, 8)
    assert config.embed_scale == math.sqrt(64) and config.attention_scale == 0.25
    assert config.activation == "gelu_pytorch_tanh" and config.zero_centred


def test_model_type_decides_where_architectures_is_absent() -> None:
    assert ModelConfig.from_checkpoint_config(
        without(tiny_config("qwen3"), "architectures")
    ).qk_norm
    assert read("qwen3", architectures=["Qwen2ForCausalLM"]).family == "qwen2"


def test_windows() -> None:
    assert read("mistral", sliding_window=9).windows == (9, 9, 9)
    assert read("mistral", sliding_window=None).windows == (None,) * 3
    assert read("llama", sliding_window=9).windows == (None,) * 3
    upper = {"sliding_window": 9, "max_window_layers": 2}
    assert read("qwen2", **upper, use_sliding_window=False).windows == (None,) * 3
    assert read("qwen2", **upper, use_sliding_window=True).windows == (None, None, 9)
    kinds = ["sliding_attention", "full_attention", "full_attention"]
    assert read("qwen3", **upper, use_sliding_window=True, layer_types=kinds).windows == (
        (9, None, None)
    )


@pytest.mark.parametrize(
    ("scaling", "wanted"),
    [
        ({"type": "linear", "factor": 4}, RopeConfig(1e4, "linear", 4.0)),
        ({"rope_type": "default"}, RopeConfig(1e4)),
        (LLAMA3, RopeConfig(1e4, "llama3", 32.0, 8192, 1.0, 4.0)),
        (
            {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
            RopeConfig(1e4, "yarn", 4.0, 256, attention_factor=0.1 * math.log(4) + 1),
        ),
        (
            {"type": "yarn", "original_max_position_embeddings": 256, "attention_factor": 1.5},
            RopeConfig(1e4, "yarn", 4.0, 256, attention_factor=1.5),
        ),
        (
            {"rope_type": "freqs", "divisors": [1.0] * 8},
            RopeConfig(1e4, "freqs", divisors=(1.0,) * 8),
        ),
    ],
)
def test_scaling_in_both_generations(scaling: dict[str, Any], wanted: RopeConfig) -> None:
    assert read(rope_scaling=scaling).rope == wanted
    five = without(tiny_config(rope_parameters={"rope_theta": 1e4, **scaling}), "rope_theta")
    assert ModelConfig.from_checkpoint_config(five).rope == wanted


@pytest.mark.parametrize(
    "scaling",
    [
        {"rope_type": "linear", "factor": 3.0},
        LLAMA3,
        {**LLAMA3, "original_max_position_embeddings": 64, "factor": 2.0},
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256},
        {
            "rope_type": "yarn",
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
            "beta_fast": 16,
            "beta_slow": 2,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "truncate": False,
        },
    ],
)
@pytest.mark.parametrize("head_dim", [16, 128])
def test_frequencies_are_transformers(scaling: dict[str, Any], head_dim: int) -> None:
    raw = tiny_config(rope_scaling=scaling, rope_theta=500000.0, head_dim=head_dim)
    rope = ModelConfig.from_checkpoint_config(raw).rope
    theirs = transformers.AutoConfig.for_model(**without(raw, "torch_dtype"))
    made = rope_utils.ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
    wanted, factor = made(theirs, torch.device("cpu"))
    torch.testing.assert_close(inverse_frequencies(rope, head_dim), wanted, rtol=2e-6, atol=0)
    assert math.isclose(rope.attention_factor, factor)


def test_divisors_divide_the_frequencies() -> None:
    """The llama3 scaling as GGUF files store it: base frequency / scaled frequency."""
    scaled = inverse_frequencies(read(rope_scaling=LLAMA3).rope, 16)
    base = inverse_frequencies(RopeConfig(1e4), 16)
    rope = RopeConfig(1e4, "freqs", divisors=tuple((base / scaled).tolist()))
    torch.testing.assert_close(inverse_frequencies(rope, 16), scaled)
    assert not torch.equal(base, scaled)


def test_rotation_turns_pairs_and_keeps_lengths() -> None:
    rotary = Rotary(RopeConfig(10000.0), 8, torch.float32, torch.device("cpu"))
    x = torch.randn(3, 2, 8)
    turned = rotate(x, rotary.at(torch.tensor([0, 1, 1000])))
    torch.testing.assert_close(turned[0], x[0])
    for channel, frequency in enumerate((1.0, 0.1, 0.01, 0.001)):
        a, b = x[2, :, channel], x[2, :, channel + 4]
        angle = torch.tensor(1000 * frequency)
        wanted = a * angle.cos() - b * angle.sin()
        torch.testing.assert_close(turned[2, :, channel], wanted, rtol=0, atol=5e-4)
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"architectures": ["MambaForCausalLM"]}, "architectures: 'MambaForCausalLM'.*LlamaForC"),
        ({"architectures": None, "model_type": "rwkv"}, "model_type: 'rwkv'.*Qwen3ForCausalLM"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope_type: 'longrope'.*yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_type: 'dynamic'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: None"),
        ({"rope_scaling": without(LLAMA3, "low_freq_factor")}, "rope_scaling.low_freq_factor"),
        ({"rope_scaling": {**LLAMA3, "low_freq_factor": 9.0}}, "low_freq_factor: must lie below"),
        ({"rope_parameters": {"rope_type": "freqs"}}, "divisors: missing"),
        ({"rope_parameters": {"rope_type": "freqs", "divisors": [1.0]}}, "divisors: 1 values"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"partial_rotary_factor": 0.25}, "partial_rotary_factor"),
        ({"hidden_act": "relu2"}, "hidden_act: 'relu2'.*gelu_pytorch_tanh"),
        ({"quantization_config": {"quant_method": "exl3"}}, "quant_method: 'exl3'.*awq, gptq"),
        ({"hidden_size": None}, "hidden_size: missing"),
        ({"num_hidden_layers": 0}, "num_hidden_layers: 0"),
        ({"vocab_size": "300"}, "vocab_size: '300'"),
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 does not divide"),
        ({"head_dim": 15}, "head_dim: 15"),
    ],
)
def test_refusals_name_the_field(overrides: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        read(**overrides)


def test_refusals_of_families() -> None:
    with pytest.raises(ConfigError, match="layer_types: 2 entries"):
        read("gemma3", layer_types=["full_attention"] * 2)
    with pytest.raises(ConfigError, match="use_bidirectional_attention"):
        read("gemma3", use_bidirectional_attention=True)
    with pytest.raises(ConfigError, match="sliding_window"):
        read("mistral", sliding_window=0)
    with pytest.raises(ConfigError, match="layer_types: 'linear_attention'"):
        read("qwen3", layer_types=["full_attention", "linear_attention", "full_attention"])
