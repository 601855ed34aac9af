"""The safetensors container: its header, checked against the size of the file.

`read_header` lists tensors with absolute offsets. Reading them is plain file reading
(target/weights.py), so the format's own library, which maps the whole file, is not needed. Knows
the layout: eight bytes of length, a JSON object, the data without gaps.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from spec_serve.target.dequant import PLAIN
from spec_serve.target.gguf import CheckpointError, TensorInfo

MAX_HEADER = 100_000_000


def read_header(path: Path) -> list[TensorInfo]:
    """The tensors of a safetensors file in the order of their data.

    Raises CheckpointError for a header that is cut short, malformed or at odds with the file.
    """
    try:
        with path.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > size - 8:
                raise CheckpointError(f"{path}: not a safetensors file, or it is cut short")
            if length > MAX_HEADER:
                raise CheckpointError(f"{path}: a header of {length} bytes is not believable")
            text = file.read(length)
    except OSError as error:
        raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error
    try:
        header = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: the header is not valid JSON ({error})") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"{path}: the header is not a JSON object")
    header.pop("__metadata__", None)
    start = 8 + length
    infos = [_info(path, name, given, start) for name, given in header.items()]
    infos.sort(key=lambda info: (info.offset, info.nbytes))
    end = start
    for info in infos:
        if info.offset != end:
            raise CheckpointError(
                f"{path}: tensor {info.name!r} begins at byte {info.offset}, the one before it "
                f"ends at {end}: they overlap or leave a gap"
            )
        end += info.nbytes
    if end != size:
        raise CheckpointError(f"{path}: the tensors end at byte {end}, the file has {size}")
    return infos


def _info(path: Path, name: str, given: Any, start: int) -> TensorInfo:
    what = f"{path}: tensor {name!r}"
    if not isinstance(given, dict):
        raise CheckpointError(f"{what}: its entry is not an object")
    dtype: Any = given.get("dtype")
    shape: Any = given.get("shape")
    span: Any = given.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in PLAIN:
        raise CheckpointError(
            f"{what}: dtype {dtype!r} is not supported; supported: {', '.join(PLAIN)}"
        )
    if not _naturals(shape) or not _naturals(span) or len(span) != 2 or span[0] > span[1]:
        raise CheckpointError(f"{what}: shape {shape!r} or data_offsets {span!r} is malformed")
    nbytes = PLAIN[dtype].itemsize
    for dim in shape:
        nbytes *= dim
    if nbytes != span[1] - span[0] or nbytes >= 2**63:
        raise CheckpointError(
            f"{what}: {dtype} {shape} takes {nbytes} bytes, data_offsets span {span[1] - span[0]}"
        )
    return TensorInfo(name, tuple(shape), dtype, start + span[0], nbytes)


def _naturals(values: Any) -> bool:
    return isinstance(values, list) and all(type(v) is int and 0 <= v < 2**63 for v in values)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name occurs twice")
    return found
