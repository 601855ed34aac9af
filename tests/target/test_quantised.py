"""Quantised checkpoints of every layout against what their whole numbers and scales mean.

Files are written bit by bit by tests/quantised_files.py, which shares no code with the reader.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from spec_serve.target.config import ConfigError, ModelConfig
from spec_serve.target.dequant import decode
from spec_serve.target.describe import describe
from spec_serve.target.model import load_model
from spec_serve.target.native import load_native, unfit
from spec_serve.target.quantised import LayoutError, gptq
from spec_serve.target.quantised_checkpoint import QuantisedCheckpoint
from spec_serve.target.quantised_config import Scheme, SchemeError, read_scheme
from spec_serve.target.weights import CheckpointError, open_checkpoint
from tests.quantised_files import FLOATS, FORMATS, GPTQ, Floats, Format, compressed, write
from tests.target.test_native import TOKENS, Run


@pytest.mark.parametrize("form", (*FORMATS, *FLOATS), ids=lambda form: form.name)
def test_every_layout_is_read_exactly(tmp_path: Path, form: Format | Floats) -> None:
    plain = write(tmp_path, form)
    checkpoint = open_checkpoint(tmp_path)
    assert isinstance(checkpoint, QuantisedCheckpoint)
    assert sorted(checkpoint.names()) == sorted(plain.names())
    ggml = "F32" if isinstance(form, Floats) else form.ggml
    for name in plain.names():
        wanted = plain.tensor(name, torch.float32)
        assert checkpoint.shape(name) == wanted.shape
        assert torch.equal(checkpoint.tensor(name, torch.float32), wanted), name
        assert torch.equal(checkpoint.tensor(name, torch.bfloat16), wanted.bfloat16())
        if not name.endswith("_proj.weight"):
            continue
        assert checkpoint.kind(name) == ggml
        if ggml != "F32":
            raw, order = checkpoint.encoded(name)
            again = torch.empty(wanted.numel())
            decode(raw, ggml, again)
            assert order is None and torch.equal(again.view(wanted.shape), wanted), name
    checkpoint.close()
    name = str(form.config["quant_method"])
    assert describe(tmp_path)["quantisation"] == {name: 7, "F32": 5}


def test_the_models_are_those_of_the_plain_weights(tmp_path: Path) -> None:
    """In torch to the bit; compiled, where weights are held as they are, as close as ever."""
    plain = write(tmp_path, FORMATS[0])
    checkpoint = open_checkpoint(tmp_path)
    wanted, _ = Run(load_model(plain)).prompt(TOKENS)
    assert torch.equal(Run(load_model(checkpoint)).prompt(TOKENS)[0], wanted)
    assert unfit(checkpoint) == ""
    found, _ = Run(load_native(checkpoint, 1)).prompt(TOKENS)
    assert ((found - wanted).norm() / wanted.norm()).item() < 0.01  # the plain head becomes Q8_0
    write(tmp_path, FLOATS[0])
    floats = open_checkpoint(tmp_path)
    assert unfit(floats) == "the weights are not quantised" and unfit(floats, "q8_0") == ""


def weights(**fields: Any) -> dict[str, Any]:
    return compressed("pack-quantized", **fields)


def test_what_files_say_besides_is_let_be() -> None:
    """Fields as tools write them around what counts."""
    group = {"input_activations": {"num_bits": 8, "dynamic": True}, "output_activations": None}
    more: dict[str, Any] = {"sparsity_config": {}, "kv_cache_scheme": {}}
    more["transform_config"] = {"config_groups": {}}
    made = weights(strategy="group", group_size=128, block_structure=None, actorder="weight")
    made["config_groups"]["group_0"] |= group
    assert read_scheme({"quantization_config": made | more}) == Scheme("compressed-tensors")
    awq = {"quant_method": "awq", "bits": 4, "version": "GEMM", "modules_to_not_convert": None}
    assert read_scheme({"quantization_config": awq}) == Scheme("awq")
    assert read_scheme({"text_config": {"quantization_config": GPTQ}}) == Scheme(
        "gptq", zeros_less_one=True
    )
    assert read_scheme({}) is None and read_scheme({"quantization_config": None}) is None


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method: 'bitsandbytes' is not supported.*awq"),
        ({"quant_method": "awq", "bits": 3}, "bits: 3 is not"),
        ({"quant_method": "awq", "w_bit": 4, "version": "gemv"}, "version: 'gemv' is not"),
        (GPTQ | {"bits": 2}, "bits: 2 is not supported; supported: 4, 8"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format: 'marlin'"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format: True"),
        ({"quant_method": "fp8", "fmt": "e5m2"}, "fmt: 'e5m2'"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size: \\[128\\]"),
        ({"quant_method": "compressed-tensors"}, "config_groups: missing"),
        (compressed("nvfp4-pack-quantized"), "format: 'nvfp4-pack-quantized'.*int-quantized"),
        (weights(num_bits=3), "group_0.weights.num_bits: 3"),
        (weights(type="float", num_bits=4), "group_0.weights.num_bits: 4 .*: 8"),
        (weights(strategy="tensor_group"), "weights.strategy: 'tensor_group'"),
        (weights(strategy="block"), "block_structure: None"),
        (weights() | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config.forma"),
        (weights() | {"transform_config": {"config_groups": {"v": 1}}}, "transform_config"),
        ([1], "an object is expected"),
    ],
)
def test_refusals_name_the_field_and_the_value(config: Any, message: str) -> None:
    with pytest.raises(SchemeError, match=f"quantization_config.*{message}"):
        read_scheme({"quantization_config": config})


def test_a_model_of_an_unknown_scheme_is_refused_before_its_weights(tmp_path: Path) -> None:
    write(tmp_path, FORMATS[1])
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["quantization_config"] = {"quant_method": "quark"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match="quant_method: 'quark'"):
        load_model(open_checkpoint(tmp_path))
    assert ModelConfig.from_checkpoint_config({**raw, "quantization_config": None}).layers == 1


def test_what_is_missing_or_does_not_fit_is_named(tmp_path: Path) -> None:
    write(tmp_path, FORMATS[1])
    place = tmp_path / "model.safetensors"
    tensors = load_file(place)
    base = "model.layers.0.mlp.up_proj."
    save_file({k: v for k, v in tensors.items() if k != base + "scales"}, place)
    with pytest.raises(CheckpointError, match="up_proj.weight: scales is missing beside qweight"):
        open_checkpoint(tmp_path)
    save_file({**tensors, base + "g_idx": torch.full((64,), 2, dtype=torch.int32)}, place)
    with pytest.raises(CheckpointError, match="up_proj.weight: g_idx: does not name one of 2"):
        open_checkpoint(tmp_path).tensor(base + "weight", torch.float32)
    held = tensors[base + "qweight"], tensors[base + "scales"], tensors[base + "qzeros"]
    with pytest.raises(LayoutError, match="groups of different sizes"):
        gptq(*held, torch.zeros(64, dtype=torch.int32), True)
    write(tmp_path, FLOATS[0])
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": None}))
    with pytest.raises(CheckpointError, match="F8_E4M3, but config.json has no quantization_conf"):
        open_checkpoint(tmp_path)
