"""Opening checkpoints: the same tiny models from memory, safetensors and GGUF, and all refusals."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from spec_serve.target import weights
from spec_serve.target.config import ModelConfig
from spec_serve.target.gguf import read_metadata
from spec_serve.target.model import load_model
from spec_serve.target.weights import CheckpointError, open_checkpoint
from tests.tiny import SPECIALS, MemoryCheckpoint, tiny_checkpoint

Kind = gguf.GGMLQuantizationType
OUTER = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
}
BLOCK = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
GEMMA3 = BLOCK | {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}


def gguf_name(name: str, arch: str) -> str:
    if name.startswith("blk."):
        return name
    stem, ending = name.rsplit(".", 1)
    if stem in OUTER:
        return f"{OUTER[stem]}.{ending}"
    _, _, layer, rest = stem.split(".", 3)
    return f"blk.{layer}.{(GEMMA3 if arch == 'gemma3' else BLOCK)[rest]}.{ending}"


def as_stored(name: str, held: Tensor, arch: str, config: Mapping[str, Any]) -> Tensor:
    """What a converter makes of a tensor before it is quantised."""
    if arch == "gemma3" and name.endswith("norm.weight"):
        return held + 1
    heads = 0
    if arch == "llama" and "q_proj" in name:
        heads = config["num_attention_heads"]
    elif arch == "llama" and "k_proj" in name:
        heads = config["num_key_value_heads"]
    if not heads:
        return held
    # Row j of a head's first half and row j of its second become neighbours.
    halves = held.view(heads, 2, -1, *held.shape[1:])
    return halves.transpose(1, 2).reshape(held.shape)


def write_gguf(
    path: Path,
    checkpoint: MemoryCheckpoint,
    arch: str,
    matrices: Kind = Kind.F32,
    edit: Callable[[gguf.GGUFWriter], None] = lambda writer: None,
    leave: tuple[str, ...] = (),
) -> Path:
    """A GGUF file as converters write it; edit: adds to it, leave: metadata keys to leave out."""
    config = checkpoint.config
    writer = gguf.GGUFWriter(path, arch)
    numbers = {
        "block_count": config["num_hidden_layers"],
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": config["head_dim"],
    }
    for key, number in numbers.items():
        if key not in leave:
            writer.add_uint32(f"{arch}.{key}", number)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", config["rms_norm_eps"])
    writer.add_float32(f"{arch}.rope.freq_base", config["rope_theta"])
    if arch == "gemma3":
        writer.add_uint32("gemma3.attention.sliding_window", config["sliding_window"])
        writer.add_array(
            "gemma3.attention.sliding_window_pattern",
            [kind == "sliding_attention" for kind in config["layer_types"]],
        )
    rows = config["vocab_size"]
    tokens = [f"t{i}" for i in range(rows - len(SPECIALS))] + list(SPECIALS)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * (rows - len(SPECIALS)) + [3] * len(SPECIALS))
    writer.add_eos_token_id(config["eos_token_id"][0])
    edit(writer)
    for name, held in checkpoint.tensors.items():
        stored = as_stored(name, held, arch, config).numpy()
        kind = matrices if held.ndim >= 2 else Kind.F32
        writer.add_tensor(gguf_name(name, arch), gguf.quants.quantize(stored, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def assert_same(path: Path, expected: MemoryCheckpoint, atol: float = 0.0) -> None:
    opened = open_checkpoint(path)
    assert sorted(opened.names()) == sorted(expected.names())
    for name in expected.names():
        assert opened.shape(name) == expected.shape(name)
        held = opened.tensor(name, torch.float32)
        assert held.is_contiguous()
        torch.testing.assert_close(held, expected.tensors[name], rtol=0, atol=atol)
    opened.close()


# GGUF

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_a_gguf_holds_the_model_it_was_made_from(arch: str, tmp_path: Path) -> None:
    memory = tiny_checkpoint(arch)
    path = write_gguf(tmp_path / "m.gguf", memory, arch)
    # Adding and subtracting 1 rounds twice.
    assert_same(path, memory, atol=1e-6 if arch == "gemma3" else 0.0)
    opened = open_checkpoint(path)
    assert opened.generation == {}
    assert opened.path == path
    wanted = ModelConfig.from_checkpoint_config(memory.config)
    assert ModelConfig.from_checkpoint_config(opened.config) == wanted
    load_model(opened)


@pytest.mark.parametrize("kind", [Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q8_0])
def test_quantised_matrices_are_the_packages_values(kind: Kind, tmp_path: Path) -> None:
    memory = tiny_checkpoint("llama")
    path = write_gguf(tmp_path / "m.gguf", memory, "llama", kind)
    opened = open_checkpoint(path)
    for name, held in memory.tensors.items():
        if held.ndim == 2:
            # Blocks lie within rows, so reordering rows and quantising commute.
            packed = gguf.quants.quantize(held.numpy(), kind)
            held = torch.from_numpy(gguf.quants.dequantize(packed, kind))
        assert torch.equal(opened.tensor(name, torch.float32), held)
        assert torch.equal(opened.tensor(name, torch.bfloat16), held.bfloat16())


def test_a_tensor_larger_than_the_buffer_is_read_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights, "PIECE_BYTES", 34 * 7)
    memory = tiny_checkpoint("qwen2")
    opened = open_checkpoint(write_gguf(tmp_path / "m.gguf", memory, "qwen2", Kind.Q8_0))
    name = "model.layers.1.mlp.up_proj.weight"
    packed = gguf.quants.quantize(memory.tensors[name].numpy(), Kind.Q8_0)
    held = torch.from_numpy(gguf.quants.dequantize(packed, Kind.Q8_0))
    assert torch.equal(opened.tensor(name, torch.float32), held)


def test_a_head_that_is_not_stored_is_tied(tmp_path: Path) -> None:
    tied = tiny_checkpoint("qwen2", tie_word_embeddings=True)
    assert "lm_head.weight" not in tied.names()
    opened = open_checkpoint(write_gguf(tmp_path / "m.gguf", tied, "qwen2"))
    assert opened.config["tie_word_embeddings"] is True
    assert "lm_head.weight" not in opened.names()


def test_the_biases_of_llamas_q_and_k_are_reordered_too(tmp_path: Path) -> None:
    memory = tiny_checkpoint("llama", attention_bias=True)
    path = write_gguf(tmp_path / "m.gguf", memory, "llama")
    assert open_checkpoint(path).config["attention_bias"] is True
    assert_same(path, memory)


def test_rope_freqs_become_divisors(tmp_path: Path) -> None:
    divisors = np.linspace(1, 8, 8, dtype=np.float32)
    path = write_gguf(
        tmp_path / "m.gguf",
        tiny_checkpoint("llama"),
        "llama",
        edit=lambda writer: writer.add_tensor("rope_freqs.weight", divisors),
    )
    opened = open_checkpoint(path)
    assert opened.config["rope_scaling"] == {"rope_type": "freqs", "divisors": divisors.tolist()}
    rope = ModelConfig.from_checkpoint_config(opened.config).rope
    assert (rope.kind, rope.divisors) == ("freqs", tuple(divisors.tolist()))
    assert "rope_freqs.weight" not in opened.names()


def test_rope_scaling_is_translated(tmp_path: Path) -> None:
    memory = tiny_checkpoint("qwen2")

    def scaling(name: str, edit: Callable[[gguf.GGUFWriter], None]) -> Any:
        path = write_gguf(tmp_path / f"{name}.gguf", memory, "qwen2", edit=edit)
        config = open_checkpoint(path).config
        ModelConfig.from_checkpoint_config(config)
        return config["rope_scaling"]

    def linear(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(2.5)

    def yarn(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(4.0)
        writer.add_rope_scaling_orig_ctx_len(256)

    def old(writer: gguf.GGUFWriter) -> None:
        writer.add_float32("qwen2.rope.scale_linear", 2.0)

    def none(writer: gguf.GGUFWriter) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.NONE)

    assert scaling("linear", linear) == {"rope_type": "linear", "factor": 2.5}
    assert scaling("old", old) == {"rope_type": "linear", "factor": 2.0}
    assert scaling("none", none) is None
    assert scaling("yarn", yarn) == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 256,
    }


def test_every_token_that_ends_a_turn_is_an_end(tmp_path: Path) -> None:
    memory = tiny_checkpoint("llama")
    end_of_text, _, end_of_turn = range(297, 300)
    assert memory.config["eos_token_id"] == [end_of_turn, end_of_text]
    path = write_gguf(
        tmp_path / "m.gguf",
        memory,
        "llama",
        edit=lambda writer: writer.add_eot_token_id(5),
    )
    assert open_checkpoint(path).config["eos_token_id"] == [end_of_turn, 5, end_of_text]


def test_numbers_are_those_that_were_written(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", tiny_checkpoint("llama"), "llama")
    stored = read_metadata(path).metadata["llama.attention.layer_norm_rms_epsilon"]
    assert stored != 1e-6
    assert open_checkpoint(path).config["rms_norm_eps"] == 1e-6


def test_layers_beyond_the_models_own_are_left_out(tmp_path: Path) -> None:
    def edit(writer: gguf.GGUFWriter) -> None:
        for name in ("blk.3.attn_q.weight", "blk.3.nextn.eh_proj.weight", "blk.7.odd.weight"):
            writer.add_tensor(name, np.zeros((4, 4), np.float32))

    memory = tiny_checkpoint("qwen3")
    assert_same(write_gguf(tmp_path / "a.gguf", memory, "qwen3", edit=edit), memory)

    def counted(writer: gguf.GGUFWriter) -> None:
        edit(writer)
        writer.add_uint32("qwen3.block_count", 4)
        writer.add_uint32("qwen3.nextn_predict_layers", 1)

    path = write_gguf(tmp_path / "b.gguf", memory, "qwen3", edit=counted, leave=("block_count",))
    assert open_checkpoint(path).config["num_hidden_layers"] == 3
    assert_same(path, memory)


def test_a_directory_with_one_gguf_is_opened(tmp_path: Path) -> None:
    memory = tiny_checkpoint("qwen2")
    write_gguf(tmp_path / "m.gguf", memory, "qwen2")
    assert_same(tmp_path, memory)
    write_gguf(tmp_path / "n.gguf", memory, "qwen2")
    with pytest.raises(CheckpointError, match=r"several GGUF files.*m\.gguf, n\.gguf"):
        open_checkpoint(tmp_path)


def unsupported_type(writer: gguf.GGUFWriter) -> None:
    blocks = np.zeros((2, 136), np.uint8)
    writer.add_tensor("blk.0.ffn_extra.weight", blocks, raw_dtype=Kind.IQ4_XS)


def unknown_tensor(writer: gguf.GGUFWriter) -> None:
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))


def freqs(values: list[float]) -> Callable[[gguf.GGUFWriter], None]:
    stored = np.array(values, np.float32)
    return lambda writer: writer.add_tensor("rope_freqs.weight", stored)


REFUSED: dict[str, tuple[Callable[[gguf.GGUFWriter], None], tuple[str, ...], str]] = {
    "type": (
        unsupported_type,
        (),
        "IQ4_XS in tensor blk.0.ffn_extra.weight is not supported; supported: F32, F16, BF16, Q4_0",
    ),
    "tensor": (unknown_tensor, (), "'blk.0.attn_sinks.weight' has no place in architecture"),
    "split": (lambda w: w.add_uint16("split.count", 3), (), "one part of a model split"),
    "experts": (lambda w: w.add_uint32("llama.expert_count", 8), (), "llama.expert_count: 8"),
    "array": (lambda w: w.add_array("llama.expert_count", [1, 2]), (), "llama.expert_count"),
    "missing": (lambda w: None, ("embedding_length",), "llama.embedding_length: missing"),
    "zero": (
        lambda w: w.add_uint32("llama.block_count", 0),
        ("block_count",),
        "llama.block_count: 0 is not a positive",
    ),
    "text": (
        lambda w: w.add_string("llama.block_count", "3"),
        ("block_count",),
        "llama.block_count: '3' is not a positive",
    ),
    "uneven": (
        lambda w: w.add_array("llama.feed_forward_length", [128, 64, 128]),
        ("feed_forward_length",),
        "llama.feed_forward_length: layers that differ",
    ),
    "partial rope": (
        lambda w: w.add_rope_dimension_count(8),
        (),
        "llama.rope.dimension_count: 8 differs from the head's 16",
    ),
    "scaling": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LONGROPE),
        (),
        "llama.rope.scaling.type: 'longrope' is not supported",
    ),
    "no factor": (
        lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.LINEAR),
        (),
        "llama.rope.scaling.factor: missing",
    ),
    "few freqs": (freqs([1.0] * 7), (), "rope_freqs.weight: 7 values for heads of 16"),
    "bad freqs": (freqs([1.0] * 7 + [0.0]), (), "rope_freqs.weight: holds values"),
    "head_dim": (
        lambda w: w.add_uint32("llama.attention.key_length", 32),
        ("attention.key_length",),
        "'blk.0.attn_q.weight': 64 rows for 4 heads of 32",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_gguf_that_is_not_supported_is_refused_by_name(case: str, tmp_path: Path) -> None:
    edit, leave, reason = REFUSED[case]
    memory = tiny_checkpoint("llama")
    path = write_gguf(tmp_path / "m.gguf", memory, "llama", edit=edit, leave=leave)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(path)
    assert str(refusal.value).startswith(f"{path}: ")
    assert reason in str(refusal.value)


def test_an_unknown_architecture_is_refused_by_name(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "mamba")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(CheckpointError, match="'mamba' is not supported; supported: llama, qwen2"):
        open_checkpoint(tmp_path / "m.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_to_a_gguf_gives_anything_but_a_refusal(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    sound = folder / "sound_model.gguf"
    if not sound.exists():
        memory = tiny_checkpoint("gemma3", vocab_size=8, eos_token_id=[5])
        write_gguf(sound, memory, "gemma3")
    content = bytearray(sound.read_bytes())
    header = read_metadata(sound).data_offset
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    damaged = folder / "damaged_model.gguf"
    damaged.write_bytes(content)
    try:
        opened = open_checkpoint(damaged)
    except CheckpointError as refusal:
        assert str(damaged) in str(refusal)
        return
    for name in opened.names():
        assert tuple(opened.tensor(name, torch.float32).shape) == opened.shape(name)
    opened.close()
