"""From torch.save to safetensors: equal tensors, nothing executed; and what `describe` says."""

from __future__ import annotations

import io
import json
import os
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from spec_serve.target.convert import convert_to_safetensors
from spec_serve.target.describe import describe
from spec_serve.target.gguf import CheckpointError
from spec_serve.target.state_dict import SavedTensors
from spec_serve.target.weights import open_checkpoint
from tests.tiny import VOCAB, write_tiny_model_dir


def saved(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def awkward() -> OrderedDict[str, Any]:
    base = torch.arange(24.0).view(4, 6)
    tensors: OrderedDict[str, Any] = OrderedDict(
        whole=base,
        shared=base,
        turned=base.t(),
        strided=base[1:, ::2],
        scalar=torch.tensor(3.5),
        empty=torch.empty(0, 3),
        parameter=torch.nn.Parameter(torch.ones(2)),
        step=7,
    )
    for dtype in (torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32):
        tensors[str(dtype)] = torch.tensor([1, 2, 3]).to(dtype)
    for dtype in (torch.int16, torch.int8, torch.uint8, torch.bool):
        tensors[str(dtype)] = torch.tensor([0, 1, 1]).to(dtype)
    return tensors


@pytest.mark.parametrize("wrapped", [False, True])
def test_tensors_come_out_as_they_were(tmp_path: Path, wrapped: bool) -> None:
    source = tmp_path / "in"
    source.mkdir()
    tensors = awkward()
    value = {"state_dict": tensors, "epoch": 3, "loss": [0.5]} if wrapped else tensors
    (source / "pytorch_model.bin").write_bytes(saved(value))
    (source / "training_args.bin").write_bytes(b"not weights")
    (source / "config.json").write_text("{}")
    told: list[str] = []
    files = convert_to_safetensors(source, tmp_path / "out", told.append)
    assert files == [tmp_path / "out" / "model.safetensors"] and told == ["pytorch_model.bin"]
    loaded = load_file(files[0])
    assert set(loaded) == set(tensors) - {"step"}
    for name, tensor in loaded.items():
        assert tensor.dtype == tensors[name].dtype
        assert torch.equal(tensor, tensors[name].detach())
    assert sorted(os.listdir(tmp_path)) == ["in", "out"]
    assert sorted(os.listdir(tmp_path / "out")) == ["config.json", "model.safetensors"]


def test_a_converted_model_opens(tmp_path: Path) -> None:
    source = write_tiny_model_dir(tmp_path / "in")
    tensors = load_file(source / "model.safetensors")
    (source / "model.safetensors").unlink()
    names = sorted(tensors)
    shards = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for shard, held in shards.items():
        (source / shard).write_bytes(saved({name: tensors[name] for name in held}))
    where = {name: shard for shard, held in shards.items() for name in held}
    index = source / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": where}))
    with pytest.raises(CheckpointError, match="convert"):
        open_checkpoint(source)
    files = convert_to_safetensors(source, tmp_path / "out")
    assert [file.name for file in files] == [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    checkpoint = open_checkpoint(tmp_path / "out")
    assert sorted(checkpoint.names()) == names
    for name in names:
        assert torch.equal(checkpoint.tensor(name, torch.float32), tensors[name])
    checkpoint.close()
    (source / "pytorch_model-2.bin").unlink()
    with pytest.raises(CheckpointError, match=r"names pytorch_model-2\.bin, which is not there"):
        convert_to_safetensors(source, tmp_path / "again")
    index.write_text(json.dumps({"weight_map": {"a": "../in/pytorch_model-1.bin"}}))
    with pytest.raises(CheckpointError, match="not there"):
        convert_to_safetensors(source, tmp_path / "again")
    assert not (tmp_path / "again").exists()


class Bomb:
    def __init__(self, target: str) -> None:
        self.target = target

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.target,)


def test_nothing_in_the_pickle_is_run(tmp_path: Path) -> None:
    target = tmp_path / "boom"
    file = tmp_path / "x.bin"
    file.write_bytes(saved({"a": torch.ones(1), "b": Bomb(str(target))}))
    with pytest.raises(CheckpointError, match=r"uses (posix|nt)\.mkdir, which a state dict"):
        SavedTensors(file)
    assert not target.exists()


def archive(pickle: bytes, **storages: bytes) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("x/data.pkl", pickle)
        for key, data in storages.items():
            file.writestr(f"x/data/{key.removeprefix('s')}", data)
    return buffer.getvalue()


def tensor_pickle(count: int, offset: int, shape: list[int], stride: list[int]) -> bytes:
    """{"t": a tensor of float32}, written by hand."""

    def number(value: int) -> bytes:
        if value < 0 or value >= 2**31:
            return b"\x8a\x09" + value.to_bytes(9, "little", signed=True)
        return b"J" + value.to_bytes(4, "little")

    def numbers(values: list[int]) -> bytes:
        return b"(" + b"".join(map(number, values)) + b"t"

    return (
        b"\x80\x02}X\x01\x00\x00\x00tctorch._utils\n_rebuild_tensor_v2\n("
        b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpu"
        + number(count)
        + b"tQ"
        + number(offset)
        + numbers(shape)
        + numbers(stride)
        + b"\x89}tRs."
    )


def test_a_pickle_by_hand(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    data = torch.arange(6.0).numpy().tobytes()
    file.write_bytes(archive(tensor_pickle(6, 1, [2, 2], [3, 1]), s0=data))
    with SavedTensors(file) as tensors:
        view = tensors.views["t"]
        assert tensors.read(view.storage).tolist() == [0, 1, 2, 3, 4, 5]
        assert (view.offset, view.shape, view.stride) == (1, (2, 2), (3, 1))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (tensor_pickle(6, 1, [2, 3], [3, 1]), "reaches beyond"),
        (tensor_pickle(6, -1, [2], [1]), "damaged"),
        (tensor_pickle(6, 0, [2], [-1]), "damaged"),
        (tensor_pickle(6, 0, [2], []), "damaged"),
        (tensor_pickle(6, 0, [1 << 40, 1 << 40], [0, 0]), "more elements"),
        (tensor_pickle(7, 0, [7], [1]), "missing or cut short"),
        (tensor_pickle(-1, 0, [0], [1]), "damaged"),
        (b"\x80\x02cbuiltins\neval\n.", r"uses builtins\.eval"),
        (b"\x80\x04\x8c\x02os\x8c\x06system\x93.", r"uses os\.system"),
        (b"\x80\x02ctorch\nload\n.", r"uses torch\.load"),
        (b"\x80\x02i0\n.", "opcode INST|damaged"),
        (b"\x80\x02(icollections\nOrderedDict\n.", "opcode INST"),
        (b"\x80\x02ccollections\nOrderedDict\n)\x81.", "opcode NEWOBJ"),
        (b"\x80\x02ccollections\nOrderedDict\n}\x85R.", "a call of something else"),
        (b"\x80\x02ctorch\nFloatStorage\n)R.", "a call of something else"),
        (b"\x80\x02]}b.", "attributes of something else"),
        (b"\x80\x02P0\n.", "opcode PERSID"),
        (b"\x80\x02K\x01.", "no dictionary"),
        (b"\x80\x02}.", "no tensors"),
        (b"\x80\x02}", "damaged|no end"),
        (b"\x80\x02R.", "damaged"),
        (b"\x80\x02t.", "damaged"),
        (b"\x80\x02h\x05.", "damaged"),
        (b"\x80\x02})K\x01s.", "damaged"),
        (b"", "damaged"),
    ],
)
def test_hostile_pickles(tmp_path: Path, content: bytes, said: str) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(archive(content, s0=bytes(24)))
    with pytest.raises(CheckpointError, match=said):
        SavedTensors(file)


def test_archives_that_are_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.bin"
    file.write_bytes(b"\x80\x02}.")
    with pytest.raises(CheckpointError, match=r"before torch 1\.6"):
        SavedTensors(file)
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as packed:
        packed.writestr("x/data.pkl", bytes(10**6))
    with pytest.raises(CheckpointError, match="compressed"):
        SavedTensors(file)
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("x/other", b"")
    with pytest.raises(CheckpointError, match=r"no data\.pkl"):
        SavedTensors(file)
    with zipfile.ZipFile(file, "w") as packed:
        packed.writestr("x/data.pkl", tensor_pickle(1, 0, [1], [1]))
        packed.writestr("x/data/0", bytes(4))
        packed.writestr("x/byteorder", b"big")
    with pytest.raises(CheckpointError, match="little-endian"):
        SavedTensors(file)


WHOLE = saved(awkward())


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damage_is_an_error_of_ours(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """Any flipped byte or cut either still gives tensors or a CheckpointError."""
    damaged = bytearray(WHOLE)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(damaged) - 1)) :]
    else:
        for _ in range(data.draw(st.integers(1, 4))):
            at = data.draw(st.integers(0, len(damaged) - 1))
            damaged[at] = data.draw(st.integers(0, 255))
    source = tmp_path_factory.mktemp("damage")
    (source / "x.bin").write_bytes(bytes(damaged))
    try:
        convert_to_safetensors(source, source / "out")
    except CheckpointError:
        assert not (source / "out").exists()


def test_refusals(tmp_path: Path) -> None:
    source = tmp_path / "in"
    with pytest.raises(CheckpointError, match="no such directory"):
        convert_to_safetensors(source, tmp_path / "out")
    source.mkdir()
    with pytest.raises(CheckpointError, match=r"holds no \.bin"):
        convert_to_safetensors(source, tmp_path / "out")
    (source / "a.bin").write_bytes(saved({"t": torch.ones(1)}))
    (source / "b.pt").write_bytes(saved({"t": torch.ones(1)}))
    with pytest.raises(CheckpointError, match=r"b\.pt: tensor 't' is in another file"):
        convert_to_safetensors(source, tmp_path / "out")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        convert_to_safetensors(source, source)
    assert sorted(os.listdir(tmp_path)) == ["in"]


def test_describe_a_directory(tmp_path: Path) -> None:
    path = write_tiny_model_dir(tmp_path / "tiny")
    file = path / "model.safetensors"
    tensors = load_file(file)
    facts = describe(path)
    assert facts == {
        "path": str(path),
        "container": "safetensors",
        "architecture": "LlamaForCausalLM",
        "parameters": sum(tensor.numel() for tensor in tensors.values()),
        "layers": 3,
        "hidden": 64,
        "heads": 4,
        "kv_heads": 2,
        "context": 1024,
        "quantisation": {"F32": len(tensors)},
        "bytes": file.stat().st_size,
        "embedding_rows": VOCAB,
        "tokenizer": "byte-level",
        "vocabulary": VOCAB,
        "chat_template": True,
    }
    json.dumps(facts)
    (path / "tokenizer.json").unlink()
    facts = describe(path)
    assert (facts["tokenizer"], facts["chat_template"]) == (None, False)


@pytest.mark.real_model
def test_describe_a_gguf() -> None:
    from spec_serve.target.hub import resolve

    facts = describe(resolve("smollm2-135m-instruct", progress=False))
    assert facts["container"] == "gguf"
    assert facts["quantisation"] == {"Q4_1": 210, "F32": 61, "Q8_0": 1}
    assert (facts["layers"], facts["heads"], facts["kv_heads"]) == (30, 9, 3)
    assert (facts["parameters"], facts["context"]) == (134_515_008, 8192)
