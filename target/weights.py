"""Checkpoints: weights and configuration of a model on disk, whatever the container.

`open_checkpoint` takes a GGUF file or a directory of safetensors and checks everything that is
cheap to check; `tensor` then streams one tensor from the file straight into the dtype asked for.
Names and config are those of a Hugging Face checkpoint. Knows files and containers; not what a
model does with its tensors (target/model.py) nor block layouts (target/dequant.py).
"""

from __future__ import annotations

import json
import os
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from spec_serve.target.dequant import PLAIN, block_of, decode
from spec_serve.target.gguf import CheckpointError, TensorInfo, read_metadata
from spec_serve.target.gguf_model import Stored, translate
from spec_serve.target.quantised_config import SchemeError, read_scheme
from spec_serve.target.safetensors import read_header

__all__ = ["Checkpoint", "CheckpointError", "open_checkpoint"]

PIECE_BYTES = 8 << 20
"""Encoded bytes held at a time while a tensor is read."""

INDEX = "model.safetensors.index.json"
UNSAFE = (".bin", ".pt", ".pth", ".ckpt")


class Checkpoint(Protocol):
    """A model's files, opened.

    config: in the form of a config.json, whatever the container. generation: the content of
    generation_config.json, or {}.
    """

    path: Path
    config: dict[str, Any]
    generation: dict[str, Any]

    def names(self) -> list[str]:
        """Tensor names as Hugging Face has them."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape in Hugging Face's orientation. CheckpointError if there is no such tensor."""

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """Read a tensor, decoded and cast into a fresh contiguous one that owns its memory.

        CheckpointError if there is no such tensor or the file no longer holds all of it.
        """

    def kind(self, name: str) -> str:
        """How a tensor is stored, as GGUF calls it: F32, BF16, Q4_K, ..."""

    def encoded(self, name: str) -> tuple[Tensor, Tensor | None]:
        """A quantised matrix as it is stored: its bytes, and the stored row of each row, [out].

        None: the rows are in order.
        """

    def close(self) -> None:
        """Let go of the files; reading is an error from then on."""


class _File:
    """A file read by position, from any thread."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._handle: int | None = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError as error:
            raise CheckpointError(f"{path}: can't be read ({error.strerror or error})") from error
        self._closer = weakref.finalize(self, os.close, self._handle)

    def close(self) -> None:
        self._handle = None
        self._closer()

    def fill(self, target: Tensor, offset: int) -> None:
        """Read target's bytes from `offset` on; target: one-dimensional, contiguous."""
        if self._handle is None:
            raise CheckpointError(f"{self.path}: the checkpoint is closed")
        view = target.view(torch.uint8).numpy().data
        while view:
            try:
                got = os.preadv(self._handle, [view], offset)
            except OSError as error:
                raise CheckpointError(f"{self.path}: can't be read ({error})") from error
            if got == 0:
                raise CheckpointError(f"{self.path}: ends at byte {offset}; it has been cut short")
            view, offset = view[got:], offset + got

    def read(self, info: TensorInfo, dtype: torch.dtype) -> Tensor:
        """A stored tensor in `dtype`, by way of a buffer of bounded size where it must change."""
        out = torch.empty(info.shape, dtype=dtype)
        flat = out.view(-1)
        if PLAIN.get(info.type) == dtype:
            self.fill(flat, info.offset)
            return out
        weights, nbytes = block_of(info.type)
        step = PIECE_BYTES // nbytes  # blocks
        total = info.nbytes // nbytes
        buffer = torch.empty(min(step, total) * nbytes, dtype=torch.uint8)
        for first in range(0, total, step):
            count = min(step, total - first)
            piece = buffer[: count * nbytes]
            self.fill(piece, info.offset + first * nbytes)
            decode(piece, info.type, flat[first * weights : (first + count) * weights])
        return out


@dataclass(frozen=True, slots=True)
class _Entry:
    file: _File
    stored: Stored


class _Opened:
    """A `Checkpoint` over any number of files."""

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        generation: dict[str, Any],
        entries: Mapping[str, _Entry],
    ) -> None:
        self.path = path
        self.config = config
        self.generation = generation
        self._entries = entries

    def names(self) -> list[str]:
        return list(self._entries)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).stored.info.shape

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        entry = self._entry(name)
        stored, file = entry.stored, entry.file
        if stored.shift:
            return (file.read(stored.info, torch.float32) + stored.shift).to(dtype)
        held = file.read(stored.info, dtype)
        return _half_split(held, stored.interleaved) if stored.interleaved else held

    def kind(self, name: str) -> str:
        return self._entry(name).stored.info.type

    def encoded(self, name: str) -> tuple[Tensor, Tensor | None]:
        entry = self._entry(name)
        stored = entry.stored
        assert not stored.shift, "matrices are stored as they are"
        raw = torch.empty(stored.info.nbytes, dtype=torch.uint8)
        entry.file.fill(raw, stored.info.offset)
        if not stored.interleaved:
            return raw, None
        return raw, _half_split(torch.arange(stored.info.shape[0]), stored.interleaved)

    def close(self) -> None:
        for entry in self._entries.values():
            entry.file.close()

    def _entry(self, name: str) -> _Entry:
        entry = self._entries.get(name)
        if entry is None:
            raise CheckpointError(f"{self.path}: there is no tensor {name!r}")
        return entry


def _half_split(rows: Tensor, heads: int) -> Tensor:
    """Rows of q or k from llama.cpp's RoPE order (pairs side by side) to halves: [N * D, ...]."""
    pairs = rows.view(heads, -1, 2, *rows.shape[1:])  # [N, D / 2, 2, ...]
    return pairs.transpose(1, 2).reshape(rows.shape)


def open_checkpoint(path: Path | str) -> Checkpoint:
    """Open a .gguf file, a directory of safetensors with its config.json, or one with one .gguf.

    All headers are read and checked; no weights are. Raises CheckpointError with the file and the
    reason. Files of pickles (.bin, .pt) are never opened.
    """
    path = Path(path)
    if path.is_dir():
        return _open_directory(path)
    if not path.exists():
        raise CheckpointError(f"{path}: there is no such file or directory")
    if path.suffix in UNSAFE:
        raise CheckpointError(f"{path}: {_convert_hint(path.parent)}")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path}: name the directory that also holds its config.json")
    return _open_gguf(path)


def _open_gguf(path: Path) -> Checkpoint:
    header = read_metadata(path)
    file = _File(path)
    translation = translate(header, lambda info: file.read(info, torch.float64).view(-1).tolist())
    entries = {name: _Entry(file, stored) for name, stored in translation.tensors.items()}
    return _Opened(path, translation.config, {}, entries)


def _open_directory(path: Path) -> Checkpoint:
    files = sorted(file for file in path.iterdir() if file.is_file())
    shards = _shards(path, [file for file in files if file.suffix == ".safetensors"])
    if shards is None:
        packed = [file for file in files if file.suffix == ".gguf"]
        if len(packed) == 1:
            return _open_gguf(packed[0])
        if packed:
            names = ", ".join(file.name for file in packed)
            raise CheckpointError(f"{path}: holds several GGUF files, name one of them: {names}")
        if any(file.suffix in UNSAFE for file in files):
            raise CheckpointError(f"{path}: {_convert_hint(path)}")
        raise CheckpointError(f"{path}: holds neither .safetensors files nor a .gguf file")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path}: config.json is missing")
    config = _read_json(path / "config.json")
    generation = path / "generation_config.json"
    entries: dict[str, _Entry] = {}
    for shard, wanted in shards.items():
        file = _File(path / shard)
        infos = {info.name: info for info in read_header(path / shard)}
        for name in infos if wanted is None else wanted:
            if name not in infos:
                raise CheckpointError(f"{path / INDEX}: {name!r} is not in {shard}")
            if name in entries:
                raise CheckpointError(f"{path / shard}: {name!r} is in another file as well")
            entries[name] = _Entry(file, Stored(infos[name]))
    opened = _Opened(path, config, _read_json(generation) if generation.is_file() else {}, entries)
    return _quantised(opened)


def _quantised(opened: Checkpoint) -> Checkpoint:
    """The checkpoint as a model wants to see it; target/config.py refuses unknown schemes."""
    from spec_serve.target.quantised_checkpoint import QuantisedCheckpoint

    try:
        scheme = read_scheme(opened.config)
    except SchemeError:
        return opened
    if scheme is not None:
        return QuantisedCheckpoint(opened, scheme)
    for name in opened.names():
        if opened.kind(name) == "F8_E4M3":
            raise CheckpointError(
                f"{opened.path}: {name!r} is F8_E4M3, but config.json has no quantization_config"
            )
    return opened


def _shards(path: Path, found: list[Path]) -> dict[str, list[str] | None] | None:
    """File name -> the tensors to take from it (None = all), or None without safetensors."""
    index = path / INDEX
    if index.is_file():
        places = _read_json(index).get("weight_map")
        if not isinstance(places, dict):
            raise CheckpointError(f"{index}: weight_map is missing or not an object")
        shards: dict[str, list[str] | None] = {}
        wanted: dict[str, list[str]] = {}
        for name, shard in places.items():
            if not isinstance(shard, str) or Path(shard).name != shard:
                raise CheckpointError(f"{index}: {shard!r} is not a file of this directory")
            wanted.setdefault(shard, []).append(name)
        for shard in wanted:
            if not (path / shard).is_file():
                raise CheckpointError(f"{path}: {shard} is missing; {INDEX} names it")
        shards.update(wanted)
        return shards
    if (path / "model.safetensors").is_file():
        return {"model.safetensors": None}
    # Some vendors add their own copy of the weights under this name.
    names = [file.name for file in found if not file.name.startswith("consolidated")]
    return dict.fromkeys(names) or None


def _convert_hint(directory: Path) -> str:
    return (
        f"only pickled weights ({', '.join(UNSAFE)}), which can run code and are never loaded; "
        f"turn them into safetensors with: spec-serve models convert {directory}"
    )


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not readable JSON ({error})") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: a JSON object is expected")
    return content
