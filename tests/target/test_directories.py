"""Directories of safetensors as checkpoints: dtypes, shards, indexes and refusals."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from spec_serve.target.weights import INDEX, CheckpointError, open_checkpoint
from tests.target.test_weights import assert_same
from tests.tiny import tiny_checkpoint, write_tiny_model_dir


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_directory_holds_the_model_it_was_made_from(family: str, tmp_path: Path) -> None:
    write_tiny_model_dir(tmp_path, family)
    memory = tiny_checkpoint(family)
    assert_same(tmp_path, memory)
    opened = open_checkpoint(tmp_path)
    assert opened.config == memory.config
    assert opened.generation == {}
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [3]}')
    assert open_checkpoint(tmp_path).generation == {"eos_token_id": [3]}


def write_dir(path: Path, files: Mapping[str, Mapping[str, Tensor]], index: object = None) -> None:
    (path / "config.json").write_text("{}")
    for name, tensors in files.items():
        save_file(dict(tensors), path / name)
    if index is not None:
        (path / INDEX).write_text(json.dumps(index))


def test_dtypes_are_cast_or_kept(tmp_path: Path) -> None:
    tensors = {
        "f64": torch.randn(3, 2, dtype=torch.float64),
        "f32": torch.randn(3, 2),
        "f16": torch.randn(3, 2).half(),
        "bf16": torch.randn(3, 2).bfloat16(),
        "i64": torch.tensor([2**62 + 1, -5]),
        "bool": torch.tensor([True, False, True]),
        "empty": torch.empty(0, 4),
        "scalar": torch.tensor(2.5),
    }
    write_dir(tmp_path, {"model.safetensors": tensors})
    opened = open_checkpoint(tmp_path)
    for name, held in tensors.items():
        for dtype in (held.dtype, torch.float32, torch.bfloat16):
            read = opened.tensor(name, dtype)
            assert read.dtype == dtype
            assert torch.equal(read, held.to(dtype))


def test_what_is_read_does_not_hang_on_the_file(tmp_path: Path) -> None:
    held = torch.randn(4, 4)
    write_dir(tmp_path, {"model.safetensors": {"a": held}})
    opened = open_checkpoint(tmp_path)
    read = opened.tensor("a", torch.float32)
    read += 1
    opened.close()
    assert torch.equal(read, held + 1)
    with pytest.raises(CheckpointError, match="closed"):
        opened.tensor("a", torch.float32)
    opened.close()
    assert torch.equal(open_checkpoint(tmp_path).tensor("a", torch.float32), held)


def test_a_file_cut_after_opening_is_an_error_and_not_a_crash(tmp_path: Path) -> None:
    write_dir(tmp_path, {"model.safetensors": {"a": torch.randn(64, 64)}})
    opened = open_checkpoint(tmp_path)
    path = tmp_path / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size - 10)
    with pytest.raises(CheckpointError, match="cut short"):
        opened.tensor("a", torch.float32)


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    write_dir(tmp_path, {"model.safetensors": {"a": torch.zeros(1)}})
    opened = open_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="there is no tensor 'b'"):
        opened.shape("b")
    with pytest.raises(CheckpointError, match="there is no tensor 'b'"):
        opened.tensor("b", torch.float32)


SHARDS = {
    "model-00001-of-00002.safetensors": {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(2)},
    "model-00002-of-00002.safetensors": {"c": torch.full((3,), 7.0)},
}
PLACES = {name: shard for shard, tensors in SHARDS.items() for name in tensors}


@pytest.mark.parametrize("index", [{"weight_map": PLACES}, None])
def test_shards_are_one_checkpoint(index: object, tmp_path: Path) -> None:
    write_dir(tmp_path, SHARDS, index)
    opened = open_checkpoint(tmp_path)
    assert sorted(opened.names()) == ["a", "b", "c"]
    for tensors in SHARDS.values():
        for name, held in tensors.items():
            assert torch.equal(opened.tensor(name, torch.float32), held)


def test_the_index_decides(tmp_path: Path) -> None:
    write_dir(tmp_path, SHARDS, {"weight_map": {"b": PLACES["b"]}})
    assert open_checkpoint(tmp_path).names() == ["b"]


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        ({"weight_map": {"a": "model-9.safetensors"}}, "model-9.safetensors is missing"),
        ({"weight_map": {"c": next(iter(SHARDS))}}, "'c' is not in model-00001"),
        ({"weight_map": {"a": "../model.safetensors"}}, "is not a file of this directory"),
        ({"weight_map": {"a": 3}}, "3 is not a file of this directory"),
        ({"weight_map": []}, "weight_map is missing or not an object"),
        ({}, "weight_map is missing"),
        ([], "a JSON object is expected"),
    ],
)
def test_a_wrong_index_is_refused(index: object, reason: str, tmp_path: Path) -> None:
    write_dir(tmp_path, SHARDS, index)
    with pytest.raises(CheckpointError, match=reason):
        open_checkpoint(tmp_path)


def test_directories_that_hold_no_model_are_refused(tmp_path: Path) -> None:
    def refusal(path: Path) -> str:
        with pytest.raises(CheckpointError) as error:
            open_checkpoint(path)
        return str(error.value)

    assert "there is no such file" in refusal(tmp_path / "none")
    assert "neither .safetensors files nor a .gguf" in refusal(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x04")
    assert f"spec-serve models convert {tmp_path}" in refusal(tmp_path)
    assert "spec-serve models convert" in refusal(tmp_path / "pytorch_model.bin")
    save_file({"a": torch.zeros(1)}, tmp_path / "x.safetensors")
    assert "config.json is missing" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{")
    assert "config.json: not readable JSON" in refusal(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    save_file({"a": torch.zeros(1)}, tmp_path / "y.safetensors")
    assert "'a' is in another file as well" in refusal(tmp_path)
    assert "name the directory" in refusal(tmp_path / "x.safetensors")
