"""The GGUF container: metadata and the table of tensors, checked before anything large is read.

`read_metadata` walks the header of a memory-mapped file; every count, length and offset is bounded
by the size of the file first, so a damaged or hostile file is refused by name and costs nothing.
Knows the layout of format versions 2 and 3; not what the keys mean, nor how the blocks of a
quantised tensor decode (target/dequant.py).
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

MAGIC = b"GGUF"
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32

GGML_TYPES: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    15: ("Q8_K", 256, 292),
    16: ("IQ2_XXS", 256, 66),
    17: ("IQ2_XS", 256, 74),
    18: ("IQ3_XXS", 256, 98),
    19: ("IQ1_S", 256, 50),
    20: ("IQ4_NL", 32, 18),
    21: ("IQ3_S", 256, 110),
    22: ("IQ2_S", 256, 82),
    23: ("IQ4_XS", 256, 136),
    24: ("I8", 1, 1),
    25: ("I16", 1, 2),
    26: ("I32", 1, 4),
    27: ("I64", 1, 8),
    28: ("F64", 1, 8),
    29: ("IQ1_M", 256, 56),
    30: ("BF16", 1, 2),
    34: ("TQ1_0", 256, 54),
    35: ("TQ2_0", 256, 66),
    39: ("MXFP4", 32, 17),
}
"""Type id -> (name, weights per block, bytes per block), the undecodable ones too: their names and
sizes are needed to refuse them and to lay out the file."""

_SCALARS = {
    0: struct.Struct("<B"),
    1: struct.Struct("<b"),
    2: struct.Struct("<H"),
    3: struct.Struct("<h"),
    4: struct.Struct("<I"),
    5: struct.Struct("<i"),
    6: struct.Struct("<f"),
    7: struct.Struct("<?"),
    10: struct.Struct("<Q"),
    11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}
_STRING, _ARRAY = 8, 9
_U32, _U64 = _SCALARS[4], _SCALARS[10]
_MIN_PAIR = 8 + 4 + 1  # key length, value type, the smallest value
_MIN_INFO = 8 + 4 + 8 + 4 + 8  # name length, dimensions, one of them, type, offset


class CheckpointError(ValueError):
    """A checkpoint that can't be used; the message names the file and the reason."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """One row of the tensor table.

    shape: outermost first, as in torch. type: the ggml type's name. offset: of the first byte,
    from the start of the file. nbytes: length of the encoded data.
    """

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True)
class GGUFFile:
    """The header of a file.

    metadata: scalars as Python values, arrays as list[str] or numpy arrays. data_offset: where the
    tensor data begin.
    """

    path: Path
    version: int
    metadata: dict[str, Any]
    tensors: list[TensorInfo]
    data_offset: int


class _Cursor:
    """Reads little-endian values one after the other and never past the end."""

    def __init__(self, data: mmap.mmap, path: Path) -> None:
        self._data = data
        self._size = len(data)
        self._path = path
        self.at = 0

    def fail(self, reason: str) -> CheckpointError:
        return CheckpointError(f"{self._path}: {reason}")

    def take(self, length: int, what: str) -> int:
        """Step over `length` bytes and return where they begin."""
        start = self.at
        if length > self._size - start:
            raise self.fail(f"the file ends in the middle of {what}; it is cut short or damaged")
        self.at = start + length
        return start

    def scalar(self, kind: struct.Struct, what: str) -> Any:
        return kind.unpack_from(self._data, self.take(kind.size, what))[0]

    def count(self, smallest: int, what: str) -> int:
        """A number of things that take at least `smallest` bytes each."""
        value = int(self.scalar(_U64, what))
        if value > (self._size - self.at) // smallest:
            raise self.fail(f"{what}: {value} is more than the file has room for")
        return value

    def string(self, what: str) -> str:
        length = self.scalar(_U64, what)
        start = self.take(length, what)
        try:
            return self._data[start : self.at].decode()
        except UnicodeDecodeError as error:
            raise self.fail(f"{what} is not UTF-8") from error

    def strings(self, count: int, what: str) -> list[str]:
        """The hot loop: vocabularies and merges are hundreds of thousands of short strings."""
        data, size, at, length_at = self._data, self._size, self.at, _U64.unpack_from
        texts: list[str] = []
        try:
            for _ in range(count):
                start = at + 8
                at = start + length_at(data, at)[0]
                if at > size:
                    raise self.fail(f"the file ends in the middle of {what}")
                texts.append(data[start:at].decode())
        except struct.error as error:
            raise self.fail(f"the file ends in the middle of {what}") from error
        except UnicodeDecodeError as error:
            raise self.fail(f"{what}: entry {len(texts)} is not UTF-8") from error
        self.at = at
        return texts

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise self.fail(f"{what}: unknown value type {kind}")
        return self.scalar(_SCALARS[kind], what)

    def _array(self, what: str) -> list[str] | np.ndarray[Any, Any]:
        kind = self.scalar(_U32, what)
        if kind == _STRING:
            return self.strings(self.count(8, what), what)
        if kind not in _SCALARS:
            raise self.fail(f"{what}: arrays of value type {kind} are not supported")
        dtype = np.dtype(_SCALARS[kind].format)
        count = self.count(dtype.itemsize, what)
        start = self.take(count * dtype.itemsize, what)
        return np.frombuffer(self._data[start : self.at], dtype)


_kept: ContextVar[dict[tuple[Path, int, int, int], GGUFFile] | None] = ContextVar(
    "headers", default=None
)


@contextmanager
def headers_kept() -> Iterator[None]:
    """Within it, a header is read once however often a file is opened: vocabularies and merges are
    hundreds of thousands of strings, and who loads a model asks for them three times."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


def read_metadata(path: Path | str) -> GGUFFile:
    """Read and check the header of a GGUF file; tensor data are left unread.

    Raises CheckpointError for anything that is not a whole, consistent file of version 2 or 3.
    Types that can't be decoded are no error here, so that they can be listed.
    """
    path = Path(path)
    kept = _kept.get()
    try:
        with path.open("rb") as file:
            told = os.fstat(file.fileno())
            key = (path, told.st_ino, told.st_size, told.st_mtime_ns)
            if kept is not None and key in kept:
                return kept[key]
            if file.read(4) != MAGIC:
                raise CheckpointError(f"{path}: not a GGUF file (it does not begin with 'GGUF')")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                made = _read(_Cursor(data, path), path, len(data))
            if kept is not None:
                kept[key] = made
            return made
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error


def _read(cursor: _Cursor, path: Path, size: int) -> GGUFFile:
    cursor.take(4, "the magic")
    version = cursor.scalar(_U32, "the version")
    if version not in (2, 3):
        swapped = int.from_bytes(int(version).to_bytes(4, "little"), "big") in (2, 3)
        kind = "big-endian files are" if swapped else f"GGUF version {version} is"
        raise cursor.fail(f"{kind} not supported; supported: little-endian versions 2 and 3")
    tensor_count = cursor.count(_MIN_INFO, "the number of tensors")
    pair_count = cursor.count(_MIN_PAIR, "the number of metadata keys")
    metadata: dict[str, Any] = {}
    for i in range(pair_count):
        key = cursor.string(f"the name of metadata key {i}")
        if key in metadata:
            raise cursor.fail(f"metadata key {key!r} occurs twice")
        kind = cursor.scalar(_U32, f"metadata key {key!r}")
        metadata[key] = cursor.value(kind, f"metadata key {key!r}")
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
        raise cursor.fail(f"general.alignment: {alignment!r} is not a power of two")
    infos = [_read_info(cursor, i, alignment) for i in range(tensor_count)]
    data_offset = -(-cursor.at // alignment) * alignment
    tensors = [
        TensorInfo(info.name, info.shape, info.type, data_offset + info.offset, info.nbytes)
        for info in infos
    ]
    _check_layout(cursor, tensors, size)
    return GGUFFile(path, version, metadata, tensors, data_offset)


def _read_info(cursor: _Cursor, index: int, alignment: int) -> TensorInfo:
    """One row of the table, its offset still relative to the data."""
    name = cursor.string(f"the name of tensor {index}")
    what = f"tensor {name!r}"
    dims = cursor.scalar(_U32, what)
    if not 1 <= dims <= MAX_DIMS:
        raise cursor.fail(f"{what}: {dims} dimensions; 1 to {MAX_DIMS} are possible")
    innermost_first = [int(cursor.scalar(_U64, what)) for _ in range(dims)]
    kind = cursor.scalar(_U32, what)
    offset = cursor.scalar(_U64, what)
    if kind not in GGML_TYPES:
        raise cursor.fail(f"{what}: unknown ggml type {kind}")
    type_name, block, block_bytes = GGML_TYPES[kind]
    elements = 1
    for dim in innermost_first:
        elements *= dim
    if not 0 < elements < 2**63:
        raise cursor.fail(f"{what}: impossible dimensions {innermost_first}")
    if innermost_first[0] % block:
        raise cursor.fail(
            f"{what}: rows of {innermost_first[0]} are not whole {type_name} blocks of {block}"
        )
    if offset % alignment:
        raise cursor.fail(f"{what}: offset {offset} is not a multiple of {alignment}")
    shape = tuple(reversed(innermost_first))
    return TensorInfo(name, shape, type_name, offset, elements // block * block_bytes)


def _check_layout(cursor: _Cursor, tensors: list[TensorInfo], size: int) -> None:
    """Names differ, every tensor lies inside the file, no two share a byte."""
    if len({info.name for info in tensors}) != len(tensors):
        raise cursor.fail("two tensors have the same name")
    end, before = 0, ""
    for info in sorted(tensors, key=lambda info: info.offset):
        if info.offset < end:
            raise cursor.fail(f"tensors {before!r} and {info.name!r} overlap")
        end, before = info.offset + info.nbytes, info.name
        if end > size:
            raise cursor.fail(
                f"tensor {info.name!r} ends at byte {end}, the file has {size}; it is cut short"
            )
