"""Directories of .bin or .pt weights made into directories of safetensors.

The one place that touches such files; they are read by target/state_dict.py, which executes
nothing. Names and dtypes stay, configuration and tokenizer files are copied, and the result appears
whole or not at all. Knows nothing of models.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

import torch

from spec_serve.target.directory_tokens import read_json
from spec_serve.target.gguf import CheckpointError
from spec_serve.target.state_dict import SavedTensors, View

SUFFIXES = (".bin", ".pt", ".pth")
_INDEX = "pytorch_model.bin.index.json"
_NOT_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_COPIED = (".json", ".jinja", ".txt", ".model", ".md")
_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def convert_to_safetensors(
    source: Path, out: Path, progress: Callable[[str], None] = lambda name: None
) -> list[Path]:
    """Write the model in `source` as safetensors to `out`, a new or empty directory.

    One file for each of the source, one storage in memory at a time; tensors that share memory are
    written out one by one. `progress` gets each source file's name. Returns the files of weights.
    Raises CheckpointError for what can't be converted, naming file and reason.
    """
    source, out = Path(source), Path(out)
    files = _weight_files(source)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise CheckpointError(f"{out}: is there already and not an empty directory")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    partial.mkdir()
    try:
        names = _convert(files, partial, progress)
        for file in source.iterdir():
            if file.suffix in _COPIED and file.is_file() and file.name != _INDEX:
                shutil.copyfile(file, partial / file.name)
        if out.exists():
            out.rmdir()
        partial.rename(out)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return [out / name for name in names]


def _weight_files(source: Path) -> list[Path]:
    if not source.is_dir():
        raise CheckpointError(f"{source}: no such directory")
    if (source / _INDEX).is_file():
        mapping = read_json(source / _INDEX).get("weight_map")
        if not isinstance(mapping, dict) or not all(isinstance(n, str) for n in mapping.values()):
            raise CheckpointError(f"{source / _INDEX}: has no weight_map of file names")
        files = [source / name for name in sorted(set(mapping.values()))]
        for file in files:
            if file.parent != source or not file.is_file():
                raise CheckpointError(f"{source / _INDEX}: names {file.name}, which is not there")
    else:
        files = [
            file
            for file in sorted(source.iterdir())
            if file.suffix in SUFFIXES and not file.name.startswith(_NOT_WEIGHTS)
        ]
    if not files:
        raise CheckpointError(f"{source}: holds no {', '.join(SUFFIXES)} weights to convert")
    return files


def _convert(files: list[Path], out: Path, progress: Callable[[str], None]) -> list[str]:
    names: list[str] = []
    where: dict[str, str] = {}
    total = 0
    for i, file in enumerate(files, 1):
        progress(file.name)
        name = "model.safetensors"
        if len(files) > 1:
            name = f"model-{i:05d}-of-{len(files):05d}.safetensors"
        with SavedTensors(file) as saved:
            for tensor in saved.views:
                if tensor in where:
                    raise CheckpointError(f"{file}: tensor {tensor!r} is in another file as well")
                where[tensor] = name
            with (out / name).open("wb") as target:
                total += _write(saved, target)
        names.append(name)
    if len(names) > 1:
        index = {"metadata": {"total_size": total}, "weight_map": where}
        (out / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
    return names


def _write(saved: SavedTensors, target: BinaryIO) -> int:
    """One safetensors file: length, header, data. Returns the bytes of data."""
    # By storage, so that each is read once however many tensors lie in it.
    ordered = sorted(saved.views.items(), key=lambda item: item[1].storage.key)
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, view in ordered:
        begin, end = end, end + _nbytes(view)
        header[name] = {
            "dtype": _DTYPES[view.storage.dtype],
            "shape": list(view.shape),
            "data_offsets": [begin, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)
    target.write(len(encoded).to_bytes(8, "little"))
    target.write(encoded)
    held, elements = None, torch.empty(0)
    for _, view in ordered:
        if view.storage != held:
            held, elements = view.storage, saved.read(view.storage)
        if _nbytes(view):
            tensor = torch.as_strided(elements, view.shape, view.stride, view.offset).contiguous()
            target.write(tensor.view(-1).view(torch.uint8).numpy().data)
    target.flush()
    os.fsync(target.fileno())
    return end


def _nbytes(view: View) -> int:
    size = view.storage.dtype.itemsize
    for dim in view.shape:
        size *= dim
    return size
