"""What a model is, for people: read from headers and configuration, no tensor data touched.

Knows which numbers `models info` shows and where they stand. Knows nothing of how they are printed,
and leaves it to others whether the model can be run.
"""

from __future__ import annotations

from collections import Counter
from math import prod
from pathlib import Path
from typing import Any

from spec_serve.target.gguf import TensorInfo, read_metadata
from spec_serve.target.quantised_checkpoint import QuantisedCheckpoint
from spec_serve.target.safetensors import read_header
from spec_serve.target.tokenizer import load_tokenizer
from spec_serve.target.weights import CheckpointError, open_checkpoint


def describe(path: Path) -> dict[str, Any]:
    """Facts about the model at a path, as JSON.

    path: a GGUF file or a model directory. `quantisation` counts tensors by type, or by the method
    that quantised them, `parameters` is the number of weights, `bytes` the size of the files of
    weights; `tokenizer` is null where there is none. Raises CheckpointError where the weights or
    the configuration can't be read.
    """
    path = Path(path)
    checkpoint = open_checkpoint(path)
    try:
        config = checkpoint.config
        parameters = sum(prod(checkpoint.shape(name)) for name in checkpoint.names())
        kinds = checkpoint.stored() if isinstance(checkpoint, QuantisedCheckpoint) else None
    finally:
        checkpoint.close()
    files = _weight_files(path)
    if kinds is None:
        kinds = [info.type for file in files for info in _tensors(file)]
    return {
        "path": str(path),
        "container": "gguf" if files[0].suffix == ".gguf" else "safetensors",
        "architecture": next(iter(config.get("architectures") or ()), config.get("model_type")),
        "parameters": parameters,
        "layers": config.get("num_hidden_layers"),
        "hidden": config.get("hidden_size"),
        "heads": config.get("num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "context": config.get("max_position_embeddings"),
        "quantisation": dict(Counter(kinds).most_common()),
        "bytes": sum(file.stat().st_size for file in files),
        "embedding_rows": config.get("vocab_size"),
        **_tokenizer(path),
    }


def _weight_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    return sorted(path.glob("*.safetensors")) or sorted(path.glob("*.gguf"))


def _tensors(file: Path) -> list[TensorInfo]:
    return read_metadata(file).tensors if file.suffix == ".gguf" else read_header(file)


def _tokenizer(path: Path) -> dict[str, Any]:
    try:
        tokenizer = load_tokenizer(path)
    except CheckpointError:
        return {"tokenizer": None, "vocabulary": None, "chat_template": False}
    return {
        "tokenizer": tokenizer.kind,
        "vocabulary": tokenizer.vocab_size,
        "chat_template": tokenizer.chat_template is not None,
    }
