"""The GGUF header and the decoding of blocks, against the `gguf` package and hostile files."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spec_serve.target import dequant
from spec_serve.target.dequant import SUPPORTED, block_of, decode
from spec_serve.target.gguf import (
    GGML_TYPES,
    CheckpointError,
    TensorInfo,
    headers_kept,
    read_metadata,
)

# Bytes at which a block's float16 fields begin: random bits there would be infinities and NaNs.
HALVES = {
    "Q4_0": (0,),
    "Q4_1": (0, 2),
    "Q5_0": (0,),
    "Q5_1": (0, 2),
    "Q8_0": (0,),
    "Q4_K": (0, 2),
    "Q5_K": (0, 2),
    "Q6_K": (208,),
}


def random_data(kind: str, blocks: int, seed: int = 0) -> np.ndarray[Any, Any]:
    """[blocks, bytes] whose every bit pattern is possible, but for the float fields."""
    rng = np.random.default_rng(seed)
    _, nbytes = block_of(kind)
    if kind not in HALVES:
        values = rng.standard_normal((blocks, 1), dtype=np.float32)
        if kind == "F32":
            return values.view(np.uint8)
        if kind == "F16":
            return values.astype(np.float16).view(np.uint8)
        return values.view(np.uint8)[:, 2:].copy()  # BF16: the upper half
    data = rng.integers(0, 256, (blocks, nbytes), dtype=np.uint8)
    for at in HALVES[kind]:
        halves = rng.standard_normal((blocks, 1)).astype(np.float16)
        data[:, at : at + 2] = halves.view(np.uint8)
    return data


def by_package(data: np.ndarray[Any, Any], kind: str) -> torch.Tensor:
    values = gguf.quants.dequantize(data, gguf.GGMLQuantizationType[kind])
    return torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32)).view(-1)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("blocks", [1, 70])
def test_decoding_equals_the_gguf_package_bit_for_bit(
    kind: str, blocks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 70 blocks in pieces of 16 (or 2): whole pieces and a remainder.
    monkeypatch.setattr(dequant, "PIECE", 512)
    data = random_data(kind, blocks)
    weights, _ = block_of(kind)
    out = torch.full((blocks * weights,), torch.nan)
    decode(torch.from_numpy(data.reshape(-1)), kind, out)
    assert same_bits(out, by_package(data, kind))


@pytest.mark.parametrize("kind", SUPPORTED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_are_the_float32_values_rounded_once(kind: str, dtype: torch.dtype) -> None:
    data = random_data(kind, 8, seed=1)
    out = torch.empty(8 * block_of(kind)[0], dtype=dtype)
    decode(torch.from_numpy(data.reshape(-1)), kind, out)
    assert torch.equal(out, by_package(data, kind).to(dtype))


def test_block_sizes_are_those_of_the_gguf_package() -> None:
    for number, (name, weights, nbytes) in GGML_TYPES.items():
        kind = gguf.GGMLQuantizationType(number)
        assert (kind.name, (weights, nbytes)) == (name, gguf.GGML_QUANT_SIZES[kind])


# Containers


def write(path: Path, alignment: int | None = None) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    if alignment is not None:
        writer.add_custom_alignment(alignment)
    writer.add_uint32("a.u32", 7)
    writer.add_int8("a.i8", -3)
    writer.add_uint64("a.u64", 2**40)
    writer.add_float32("a.f32", 0.5)
    writer.add_float64("a.f64", 0.1)
    writer.add_bool("a.bool", True)
    writer.add_string("a.text", "grüße\n")
    writer.add_array("a.texts", ["", "Ġthe", "世界"])
    writer.add_array("a.ints", [3, -1, 4])
    writer.add_array("a.floats", [0.25, -1.5])
    writer.add_array("a.flags", [True, False, True])
    writer.add_tensor("one", np.arange(6, dtype=np.float32).reshape(2, 3))
    quantised = gguf.quants.quantize(np.ones((4, 64), np.float32), gguf.GGMLQuantizationType.Q8_0)
    writer.add_tensor("two", quantised, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("alignment", [None, 64, 8])
def test_header_is_read_as_it_was_written(tmp_path: Path, alignment: int | None) -> None:
    path = write(tmp_path / "x.gguf", alignment)
    file = read_metadata(path)
    metadata = file.metadata
    assert (file.version, metadata["general.architecture"]) == (3, "llama")
    scalars = [metadata[f"a.{key}"] for key in ("u32", "i8", "u64", "f32", "f64", "bool", "text")]
    assert scalars == [7, -3, 2**40, 0.5, 0.1, True, "grüße\n"]
    assert metadata["a.bool"] is True
    assert metadata["a.texts"] == ["", "Ġthe", "世界"]
    assert metadata["a.ints"].tolist() == [3, -1, 4]
    assert metadata["a.floats"].tolist() == [0.25, -1.5]
    assert metadata["a.flags"].tolist() == [True, False, True]
    assert file.data_offset % (alignment or 32) == 0
    one, two = file.tensors
    assert (one.name, one.shape, one.type, one.nbytes) == ("one", (2, 3), "F32", 24)
    assert (two.name, two.shape, two.type, two.nbytes) == ("two", (4, 64), "Q8_0", 8 * 34)
    data = path.read_bytes()
    assert np.frombuffer(data[one.offset :], "<f4", 6).tolist() == [0, 1, 2, 3, 4, 5]
    assert len(data) >= two.offset + two.nbytes


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def pair(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def info(name: str, dims: list[int], kind: int, offset: int) -> bytes:
    head = text(name) + struct.pack("<I", len(dims))
    return head + struct.pack(f"<{len(dims)}Q", *dims) + struct.pack("<IQ", kind, offset)


def raw(
    pairs: list[bytes],
    infos: list[bytes],
    data: int = 4096,
    version: int = 3,
    counts: tuple[int, int] | None = None,
) -> bytes:
    tensors, keys = counts or (len(infos), len(pairs))
    head = b"GGUF" + struct.pack("<IQQ", version, tensors, keys) + b"".join(pairs + infos)
    return head + bytes(-len(head) % 32) + bytes(data)


U32 = struct.pack("<I", 5)
REFUSED = {
    "another magic": (b"GGML" + bytes(60), "not a GGUF file"),
    "nothing": (b"", "not a GGUF file"),
    "only the magic": (b"GGUF", "ends in the middle of the version"),
    "version 1": (raw([], [], version=1), "GGUF version 1 is not supported"),
    "big-endian": (raw([], [], version=0x03000000), "big-endian"),
    "too many tensors": (raw([], [], counts=(2**60, 0)), "the number of tensors: 1152921"),
    "too many keys": (raw([], [], counts=(0, 2**60)), "the number of metadata keys"),
    "a long key": (raw([struct.pack("<Q", 2**50)], []), "the name of metadata key 0"),
    "a key twice": (raw([pair("k", 4, U32)] * 2, []), "'k' occurs twice"),
    "not UTF-8": (raw([pair("k", 8, struct.pack("<Q", 1) + b"\xff")], []), "'k' is not UTF-8"),
    "value type": (raw([pair("k", 13, U32)], []), "'k': unknown value type 13"),
    "nested": (raw([pair("k", 9, struct.pack("<IQ", 9, 1))], []), "'k': arrays of value type 9"),
    "array length": (
        raw([pair("k", 9, struct.pack("<IQ", 10, 2**61))], []),
        "'k': 2305843009213693952 is more than the file has room for",
    ),
    "strings": (
        raw([pair("k", 9, struct.pack("<IQQ", 8, 1, 2**63))], []),
        "the file ends in the middle of metadata key 'k'",
    ),
    "strings not UTF-8": (
        raw(
            [pair("k", 9, struct.pack("<IQ", 8, 2) + text("a") + struct.pack("<Q", 1) + b"\xc3")],
            [],
        ),
        "'k': entry 1 is not UTF-8",
    ),
    "alignment": (
        raw([pair("general.alignment", 4, struct.pack("<I", 24))], []),
        "general.alignment: 24 is not a power of two",
    ),
    "alignment 0": (raw([pair("general.alignment", 4, bytes(4))], []), "general.alignment: 0"),
    "alignment's type": (raw([pair("general.alignment", 8, text("x"))], []), "alignment: 'x'"),
    "dimensions": (raw([], [info("t", [1] * 5, 0, 0)]), "'t': 5 dimensions"),
    "no dimensions": (raw([], [info("t", [], 0, 0)], data=64), "'t': 0 dimensions"),
    "empty": (raw([], [info("t", [4, 0], 0, 0)]), "'t': impossible dimensions"),
    "overflow": (raw([], [info("t", [2**40, 2**40], 0, 0)]), "'t': impossible dimensions"),
    "wraps to 4": (raw([], [info("t", [4, 2**62 + 1, 4], 0, 0)]), "'t': impossible dimensions"),
    "unknown type": (raw([], [info("t", [4], 99, 0)]), "'t': unknown ggml type 99"),
    "half a block": (raw([], [info("t", [48], 8, 0)]), "rows of 48 are not whole Q8_0 blocks"),
    "unaligned": (raw([], [info("t", [4], 0, 4)]), "offset 4 is not a multiple of 32"),
    "outside": (raw([], [info("t", [1024], 0, 32)]), "'t' ends at byte"),
    "far outside": (raw([], [info("t", [4], 0, 2**63)]), "'t' ends at byte"),
    "overlap": (
        raw([], [info("a", [16], 0, 0), info("b", [16], 0, 32)]),
        "tensors 'a' and 'b' overlap",
    ),
    "a tensor twice": (
        raw([], [info("a", [8], 0, 0), info("a", [8], 0, 32)]),
        "two tensors have the same name",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_damaged_files_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    content, reason = REFUSED[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(content)
    with pytest.raises(CheckpointError) as refusal:
        read_metadata(path)
    assert reason in str(refusal.value)
    assert str(path) in str(refusal.value)


def test_the_smallest_file_that_holds_nothing_wrong_is_read(tmp_path: Path) -> None:
    path = tmp_path / "ok.gguf"
    path.write_bytes(raw([pair("k", 4, U32)], [info("t", [1024], 0, 0)], version=2))
    file = read_metadata(path)
    assert file.metadata == {"k": 5}
    assert file.tensors == [TensorInfo("t", (1024,), "F32", file.data_offset, 4096)]


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="can't be read"):
        read_metadata(tmp_path / "none.gguf")


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(data=st.data())
def test_no_damage_to_a_header_gives_anything_but_a_refusal(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp()
    sound = folder / "sound.gguf"
    if not sound.exists():
        write(sound)
    content = bytearray(sound.read_bytes())
    header = read_metadata(sound).data_offset
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, header - 1))
        content[at] = data.draw(st.integers(0, 255))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content))) :]
    damaged = folder / "damaged.gguf"
    damaged.write_bytes(content)
    try:
        file = read_metadata(damaged)
    except CheckpointError as refusal:
        assert str(damaged) in str(refusal)
    else:
        assert all(t.offset + t.nbytes <= len(content) for t in file.tensors)


def test_a_file_cut_anywhere_is_refused(tmp_path: Path) -> None:
    content = write(tmp_path / "x.gguf").read_bytes()
    end = max(t.offset + t.nbytes for t in read_metadata(tmp_path / "x.gguf").tensors)
    short = tmp_path / "short.gguf"
    for length in range(end):
        short.write_bytes(content[:length])
        with pytest.raises(CheckpointError):
            read_metadata(short)


def test_a_header_is_read_once_while_a_model_is_loaded(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    for names in (["a"], ["a", "b"]):
        writer = gguf.GGUFWriter(path, "llama")
        writer.add_array("tokenizer.ggml.tokens", names)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        if names == ["a"]:
            with headers_kept():
                first = read_metadata(path)
                assert read_metadata(path) is first
            assert read_metadata(path) is not first
    with headers_kept():
        assert read_metadata(path).metadata["tokenizer.ggml.tokens"] == ["a", "b"]
