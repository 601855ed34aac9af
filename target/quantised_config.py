"""What config.json says about quantised weights: methods that can be read, the rest refused.

`read_scheme` takes the `quantization_config` of AWQ, GPTQ, compressed-tensors and the fp8 methods.
Which matrices are quantised is not asked here: their tensors tell (target/quantised_files.py). How
activations were meant to be rounded does not matter, they are left as they are. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

METHODS = ("awq", "gptq", "compressed-tensors", "fp8", "fbgemm_fp8")
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "dense")
"""The formats of compressed-tensors that can be read."""

_FIELD = "quantization_config"


class SchemeError(ValueError):
    """A quantisation that can't be read; the message names the field and its value."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How a checkpoint's matrices are stored.

    method: one of METHODS. block: rows and columns to a scale where scales stand for blocks.
    zeros_less_one: GPTQ's first format keeps each zero point less one.
    """

    method: str
    block: tuple[int, int] | None = None
    zeros_less_one: bool = False


def read_scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme of a config.json's content, None where it names none.

    Raises SchemeError naming the field and the value that can't be followed.
    """
    raw = config.get(_FIELD)
    if raw is None and isinstance(config.get("text_config"), Mapping):
        raw = config["text_config"].get(_FIELD)
    if raw is None:
        raw = config.get("compression_config")  # what compressed-tensors wrote at first
    if raw is None or raw == {}:
        return None
    if not isinstance(raw, Mapping):
        raise SchemeError(f"{_FIELD}: an object is expected")
    method = raw.get("quant_method")
    if method not in METHODS:
        raise _refusal("quant_method", method, METHODS)
    if method == "awq":
        return _awq(raw)
    if method == "gptq":
        return _gptq(raw)
    if method == "compressed-tensors":
        return _compressed(raw)
    return _fp8(raw, str(method))


def _refusal(field: str, value: object, known: tuple[object, ...]) -> SchemeError:
    listed = ", ".join(map(str, known))
    return SchemeError(f"{_FIELD}.{field}: {value!r} is not supported; supported: {listed}")


def _one_of(raw: Mapping[str, Any], fields: tuple[str, ...], known: tuple[Any, ...]) -> Any:
    """The first of some fields that is there; the first known value if none is."""
    for field in fields:
        value = raw.get(field)
        if value is not None:
            value = value.lower() if isinstance(value, str) else value
            if value not in known or isinstance(value, bool):
                raise _refusal(field, raw[field], known)
            return value
    return known[0]


def _awq(raw: Mapping[str, Any]) -> Scheme:
    _one_of(raw, ("bits", "w_bit"), (4,))
    _one_of(raw, ("version", "format"), ("gemm",))
    return Scheme("awq")


def _gptq(raw: Mapping[str, Any]) -> Scheme:
    _one_of(raw, ("bits",), (4, 8))
    if raw.get("is_marlin_format"):
        raise _refusal("is_marlin_format", True, (False,))
    version = _one_of(raw, ("checkpoint_format", "format"), ("gptq", "gptq_v2"))
    return Scheme("gptq", zeros_less_one=version == "gptq")


def _fp8(raw: Mapping[str, Any], method: str) -> Scheme:
    _one_of(raw, ("fmt",), ("e4m3",))
    _one_of(raw, ("expert_dtype",), ("fp8",))
    block = raw.get("weight_block_size")
    return Scheme(method, None if block is None else _block("weight_block_size", block))


def _block(field: str, value: object) -> tuple[int, int]:
    if isinstance(value, (list, tuple)) and len(value) == 2:
        rows, columns = value
        if all(type(side) is int and side > 0 for side in (rows, columns)):
            return rows, columns
    raise SchemeError(f"{_FIELD}.{field}: {value!r} is not a pair of positive whole numbers")


def _compressed(raw: Mapping[str, Any]) -> Scheme:
    groups = raw.get("config_groups")
    if not isinstance(groups, Mapping) or not groups:
        raise SchemeError(f"{_FIELD}.config_groups: missing or not an object")
    sparse = raw.get("sparsity_config") or {}
    if isinstance(sparse, Mapping) and sparse.get("format", "dense") != "dense":
        raise _refusal("sparsity_config.format", sparse["format"], ("dense",))
    turned = raw.get("transform_config") or {}
    if not isinstance(turned, Mapping) or turned.get("config_groups"):
        raise SchemeError(f"{_FIELD}.transform_config: rotations are not supported")
    default = raw.get("format")
    blocks: set[tuple[int, int]] = set()
    for name, group in groups.items():
        field = f"config_groups.{name}"
        if not isinstance(group, Mapping):
            raise SchemeError(f"{_FIELD}.{field}: {group!r} is not an object")
        own = group.get("format") or default
        if own not in FORMATS:
            raise _refusal(f"{field}.format" if group.get("format") else "format", own, FORMATS)
        weights = group.get("weights")
        if isinstance(weights, Mapping):
            block = _weights(weights, f"{field}.weights")
            blocks |= {block} if block is not None else set()
    if len(blocks) > 1:
        raise SchemeError(f"{_FIELD}.config_groups: blocks of different sizes: {sorted(blocks)}")
    return Scheme("compressed-tensors", next(iter(blocks), None))


def _weights(raw: Mapping[str, Any], field: str) -> tuple[int, int] | None:
    """What one group says about its weights: the size of its blocks, if it has any."""
    kind, bits = raw.get("type", "int"), raw.get("num_bits", 8)
    if kind not in ("int", "float"):
        raise _refusal(f"{field}.type", kind, ("int", "float"))
    known = (4, 8) if kind == "int" else (8,)
    if bits not in known:
        raise _refusal(f"{field}.num_bits", bits, known)
    strategies = ("tensor", "channel", "group", "block")
    strategy = raw.get("strategy")
    if strategy is not None and strategy not in strategies:
        raise _refusal(f"{field}.strategy", strategy, strategies)
    if strategy != "block":
        return None
    block = raw.get("block_structure")
    if isinstance(block, str):  # "128x128" in older files
        block = [int(side) if side.isdigit() else 0 for side in block.split("x")]
    return _block(f"{field}.block_structure", block)
