"""A checkpoint whose matrices are quantised, seen as one of plain ones.

Finds the tensors that make up each matrix by their names, shows them as the one `weight` a model
asks for, and gives it dequantised, as ggml's bytes where a type of ggml's holds it unchanged
(target/native.py), or as the codes themselves (target/linears.py). Knows names and files; layouts
are target/quantised.py's.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spec_serve.kernels.quantised import Codes
from spec_serve.target.gguf import CheckpointError
from spec_serve.target.quantised import (
    LayoutError,
    Words,
    awq,
    ggml_bytes,
    ggml_type,
    gptq,
    packed,
    plain_bytes,
)
from spec_serve.target.quantised_config import Scheme
from spec_serve.target.weights import Checkpoint

_WORDS = {"qweight", "qzeros", "scales", "g_idx"}
_PACKED = {"weight_packed", "weight_shape", "weight_scale", "weight_zero_point", "weight_g_idx"}
_PLAIN = {"weight_scale", "weight_scale_inv", "weight_zero_point"}
_UNUSED = {"input_scale", "input_zero_point", "output_scale", "weight_global_scale"}
_IN_WORDS = {"qweight", "qzeros", "weight_packed"}
_BYTES = ("F8_E4M3", "I8")
_SCALES = {"F16": torch.float16, "BF16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class _Matrix:
    """Where a matrix's parts are: the last part of a tensor's name -> the whole name."""

    parts: dict[str, str]
    shape: tuple[int, int]


class QuantisedCheckpoint:
    """See target/weights.py's `Checkpoint`; `codes` is what it has beyond that."""

    def __init__(self, held: Checkpoint, scheme: Scheme) -> None:
        """Raises CheckpointError for a matrix whose tensors are missing or don't fit."""
        self.path: Path = held.path
        self.config: dict[str, Any] = held.config
        self.generation: dict[str, Any] = held.generation
        self.scheme = scheme
        self._held = held
        self._matrices: dict[str, _Matrix] = {}
        self._types: dict[str, str] = {}
        self._names = self._find()

    def _find(self) -> list[str]:
        """The names to show; fills `_matrices`."""
        modules: dict[str, dict[str, str]] = defaultdict(dict)
        for name in self._held.names():
            module, _, part = name.rpartition(".")
            modules[module][part] = name
        shown = []
        for module, parts in modules.items():
            hidden: set[str] = set()
            for kind, own in (("qweight", _WORDS), ("weight_packed", _PACKED), ("weight", _PLAIN)):
                if kind not in parts or (kind == "weight" and not self._in_bytes(parts)):
                    continue
                name = f"{module}.weight"
                hidden = own | {kind} | _UNUSED
                self._matrices[name] = self._matrix(name, kind, parts)
                shown.append(name)
                break
            shown += [name for part, name in parts.items() if part not in hidden]
        return shown

    def _in_bytes(self, parts: dict[str, str]) -> bool:
        """Whether `weight` is stored in bytes that mean nothing without a scale."""
        return self._held.kind(parts["weight"]) in _BYTES

    def _matrix(self, name: str, kind: str, parts: dict[str, str]) -> _Matrix:
        wanted = {
            "qweight": {"scales"} if self.scheme.method == "awq" else {"scales", "qzeros"},
            "weight_packed": {"weight_scale", "weight_shape"},
            "weight": set() if "weight_scale_inv" in parts else {"weight_scale"},
        }[kind]
        if missing := sorted(wanted - set(parts)):
            raise CheckpointError(f"{self.path}: {name}: {missing[0]} is missing beside {kind}")
        if kind == "qweight" and self.scheme.method not in ("awq", "gptq"):
            raise CheckpointError(
                f"{self.path}: {parts[kind]}: quantization_config.quant_method "
                f"{self.scheme.method!r} has no such tensors"
            )
        for part in _IN_WORDS & parts.keys():
            if (found := self._held.kind(parts[part])) != "I32":
                raise CheckpointError(f"{self.path}: {parts[part]}: {found} instead of I32")
        shape = self._held.shape(parts[kind])
        if len(shape) != 2:
            raise CheckpointError(f"{self.path}: {parts[kind]}: {list(shape)} is not a matrix")
        if kind == "weight_packed":
            rows, columns = self._held.tensor(parts["weight_shape"], torch.int64).tolist()
            return _Matrix(parts, (rows, columns))
        if kind == "weight":
            return _Matrix(parts, (shape[0], shape[1]))
        if self.scheme.method == "awq":
            return _Matrix(parts, (8 * shape[1], shape[0]))
        outputs = self._held.shape(parts["scales"])[-1]
        bits = 32 * self._held.shape(parts["qzeros"])[-1] // max(outputs, 1)
        if bits not in (4, 8):
            raise CheckpointError(
                f"{self.path}: {parts['qzeros']}: {bits} bits are not supported; supported: 4, 8"
            )
        return _Matrix(parts, (outputs, shape[0] * 32 // bits))

    def names(self) -> list[str]:
        """Names as in a plain checkpoint."""
        return list(self._names)

    def stored(self) -> list[str]:
        """How each tensor is stored: its type, or the method of a quantised matrix."""
        return [
            self.scheme.method if name in self._matrices else self._held.kind(name)
            for name in self._names
        ]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the plain tensor."""
        found = self._matrices.get(name)
        return self._held.shape(name) if found is None else found.shape

    def tensor(self, name: str, dtype: torch.dtype) -> Tensor:
        """A tensor; a quantised matrix is multiplied out in float32 and rounded once."""
        codes = self.codes(name)
        return self._held.tensor(name, dtype) if codes is None else codes.weight(dtype)

    def kind(self, name: str) -> str:
        """ggml's type of a quantised matrix it has a type for; F32 for others, as they are read."""
        if name not in self._matrices:
            return self._held.kind(name)
        parts = self._matrices[name].parts
        if "weight" in parts and self._held.kind(parts["weight"]) == "F8_E4M3":
            return "F32"
        if name not in self._types:
            codes = self._codes(name, "cpu", bulk=False)
            assert codes is not None
            self._types[name] = ggml_type(codes) or "F32"
        return self._types[name]

    def encoded(self, name: str) -> tuple[Tensor, Tensor | None]:
        """The bytes of a matrix of such a type."""
        codes = self.codes(name)
        return self._held.encoded(name) if codes is None else (ggml_bytes(codes), None)

    def close(self) -> None:
        """Let go of the files."""
        self._held.close()

    def codes(self, name: str, device: torch.device | str = "cpu") -> Codes | None:
        """A quantised matrix as it is, None if it is plain. Unpacked on `device`, left there."""
        return self._codes(name, device, bulk=True)

    def _codes(self, name: str, device: torch.device | str, bulk: bool) -> Codes | None:
        """bulk: read the codes too; else they have a shape only."""
        found = self._matrices.get(name)
        if found is None:
            return None
        try:
            return self._read(found, device, bulk)
        except LayoutError as error:
            raise CheckpointError(f"{self.path}: {name}: {error}") from error

    def _read(self, matrix: _Matrix, device: torch.device | str, bulk: bool) -> Codes:
        parts, scheme = matrix.parts, self.scheme

        def main(name: str, dtype: torch.dtype) -> Words:
            if bulk:
                return part(name, dtype)
            rows, columns = self._held.shape(parts[name])
            return rows, columns

        def part(name: str, dtype: torch.dtype) -> Tensor:
            return self._held.tensor(parts[name], dtype).to(device)

        def some(name: str, dtype: torch.dtype) -> Tensor | None:
            return part(name, dtype) if name in parts else None

        def stored(name: str) -> Tensor:
            """In a dtype that keeps every value."""
            return part(name, _SCALES.get(self._held.kind(parts[name]), torch.float32))

        if "qweight" in parts:
            words, scales = main("qweight", torch.int32), stored("scales")
            zeros = some("qzeros", torch.int32)
            if scheme.method == "awq":
                return awq(words, scales, zeros)
            assert zeros is not None
            return gptq(words, scales, zeros, some("g_idx", torch.int32), scheme.zeros_less_one)
        scale = stored("weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale")
        zero = None
        if "weight_zero_point" in parts:
            whole = self._held.kind(parts["weight_zero_point"]) == "I32"
            zero = part("weight_zero_point", torch.int32 if whole else torch.int8)
        if "weight_packed" in parts:
            order = some("weight_g_idx", torch.int32)
            words = main("weight_packed", torch.int32)
            return packed(words, matrix.shape, scale, zero, order)
        eight = self._held.kind(parts["weight"]) == "I8"
        weight = main("weight", torch.int8 if eight else torch.float8_e4m3fn)
        return plain_bytes(weight, scale, None if not eight else zero, scheme.block)
