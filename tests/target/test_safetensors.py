"""The safetensors container: every damage is a refusal that names the file and the reason."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file

from spec_serve.target.weights import CheckpointError, open_checkpoint


def container(header: object, data: int = 8) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(data)


def entry(dtype: Any = "F32", shape: Any = (2,), span: Any = (0, 8)) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": span}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "cut short"),
        (b"abc", "cut short"),
        (struct.pack("<Q", 2**63), "cut short"),
        (container(b"{"), "not valid JSON"),
        (container(b"[" * 20000), "not valid JSON"),
        (container(b"\xff{}"), "not valid JSON"),
        (container([]), "not a JSON object"),
        (container(b'{"a": 1, "a": 2}'), "a name occurs twice"),
        (container({"a": 3}), "'a': its entry is not an object"),
        (container({"a": entry("F8_E5M2")}), "'F8_E5M2' is not supported; supported: F64, F32"),
        (container({"a": entry(["F32"])}), "is not supported"),
        (container({"a": entry(shape=(-2,))}), "is malformed"),
        (container({"a": entry(shape=(True, 2))}), "is malformed"),
        (container({"a": entry(shape=None)}), "is malformed"),
        (container({"a": entry(span=(0,))}), "is malformed"),
        (container({"a": entry(span=(8, 0))}), "is malformed"),
        (container({"a": entry(shape=(3,))}), "takes 12 bytes, data_offsets span 8"),
        (container({"a": entry(shape=(2**40, 2**40))}), "takes"),
        (container({"a": entry(span=(8, 16))}), "overlap or leave a gap"),
        (container({"a": entry(), "b": entry()}, 8), "overlap or leave a gap"),
        (container({"a": entry(), "b": entry(span=(12, 20))}, 20), "overlap or leave a gap"),
        (container({"a": entry()}, 4), "the tensors end at byte"),
        (container({"a": entry()}, 12), "the tensors end at byte"),
    ],
)
def test_a_damaged_container_is_refused(content: bytes, reason: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        open_checkpoint(tmp_path)
    assert str(refusal.value).startswith(str(path))
    assert reason in str(refusal.value)


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_to_a_container_gives_anything_but_a_refusal(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "damaged_dir"
    folder.mkdir(exist_ok=True)
    path = folder / "model.safetensors"
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(2, 3), "b": torch.ones(5).half()}, path)
    content = bytearray(path.read_bytes())
    header = 8 + int.from_bytes(content[:8], "little")
    for _ in range(data.draw(st.integers(1, 3))):
        content[data.draw(st.integers(0, header - 1))] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    path.write_bytes(content)
    try:
        opened = open_checkpoint(folder)
    except CheckpointError as refusal:
        assert str(path) in str(refusal)
        return
    for name in opened.names():
        assert tuple(opened.tensor(name, torch.float32).shape) == opened.shape(name)
    opened.close()
