"""Tiny quantised checkpoints, written bit by bit as the formats' descriptions say.

Each case makes whole numbers, scales and zero points for every matrix of a one-layer model, packs
them with loops over bits, and works out what they mean by the formula. Shares no code with what
reads them. Used by tests only.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from tests.tiny import MemoryCheckpoint, tiny_checkpoint, tiny_config

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output behind each half byte of a word


@dataclass(frozen=True, slots=True)
class Numbers:
    """q [out, in], zero [out, groups], scale [out, groups]; group_of [in]."""

    q: Tensor
    zero: Tensor
    scale: Tensor
    group_of: Tensor

    @property
    def means(self) -> Tensor:
        """The weight, by the formula. # [out, in] float32"""
        numbers = self.q.float() - self.zero.float()[:, self.group_of]
        return numbers * self.scale.float()[:, self.group_of]


Store = Callable[[Numbers, int], dict[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Format:
    """bits of a code; group: inputs to a scale, 0 = all; zeros, ordered: are there zero points, is
    there an order of inputs. ggml: the type that holds such a matrix as it is."""

    name: str
    config: dict[str, Any]
    store: Store
    bits: int = 4
    group: int = 32
    zeros: bool = False
    ordered: bool = False
    scales: torch.dtype = torch.float16
    ggml: str = "F32"


def words(codes: list[list[int]], bits: int) -> Tensor:
    """Rows of codes -> rows of 32-bit words, the first code lowest."""
    per = 32 // bits
    rows = []
    for row in codes:
        padded = row + [0] * (-len(row) % per)
        made = []
        for at in range(0, len(padded), per):
            word = sum(code << (bits * i) for i, code in enumerate(padded[at : at + per]))
            made.append(word - (1 << 32) if word >= 1 << 31 else word)
        rows.append(made)
    return torch.tensor(rows, dtype=torch.int32)


def awq(n: Numbers, bits: int) -> dict[str, Tensor]:
    def packed(codes: Tensor) -> Tensor:  # [rows, out]
        rows = codes.tolist()
        order = [8 * (i // 8) + AWQ_ORDER[i % 8] for i in range(len(rows[0]))]
        return words([[row[i] for i in order] for row in rows], bits)

    scales = n.scale.T.contiguous()
    return {"qweight": packed(n.q.T), "qzeros": packed(n.zero.T), "scales": scales}


def gptq(less: int) -> Store:
    def store(n: Numbers, bits: int) -> dict[str, Tensor]:
        kept = [[(z - less) % 2**bits for z in row] for row in n.zero.T.tolist()]
        return {
            "qweight": words(n.q.tolist(), bits).T.contiguous(),
            "qzeros": words(kept, bits),
            "scales": n.scale.T.contiguous(),
            "g_idx": n.group_of.to(torch.int32),
        }

    return store


def packed(zeros: bool) -> Store:
    def store(n: Numbers, bits: int) -> dict[str, Tensor]:
        made = {
            "weight_packed": words(n.q.tolist(), bits),
            "weight_scale": n.scale,
            "weight_shape": torch.tensor(n.q.shape),
        }
        if zeros:
            made["weight_zero_point"] = words(n.zero.T.tolist(), bits).T.contiguous()
        return made

    return store


def integers(zeros: bool) -> Store:
    def store(n: Numbers, bits: int) -> dict[str, Tensor]:
        made = {"weight": (n.q - 128).to(torch.int8), "weight_scale": n.scale}
        if zeros:
            made["weight_zero_point"] = (n.zero - 128).to(torch.int8)
        return made

    return store


def compressed(kind: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "config_groups": {"group_0": group},
        "ignore": ["lm_head"],
    }


GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32}
FORMATS = (
    Format("awq", {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm"}, awq,
           zeros=True, ggml="Q5_0"),
    Format("gptq", GPTQ | {"sym": True}, gptq(1), ggml="Q4_0"),
    Format("gptq, zeros", GPTQ, gptq(1), zeros=True, ggml="Q5_0"),
    Format("gptq_v2, act-order", GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, gptq(0),
           zeros=True, ordered=True),
    Format("gptq, 8 bits", GPTQ | {"bits": 8, "group_size": -1}, gptq(1), 8, 0, ggml="Q8_0"),
    Format("pack-quantized", compressed("pack-quantized", num_bits=4, strategy="group"),
           packed(False), scales=torch.bfloat16, ggml="Q4_0"),
    Format("pack-quantized, zeros", compressed("pack-quantized", num_bits=4, strategy="channel"),
           packed(True), group=0, zeros=True, scales=torch.bfloat16, ggml="Q5_0"),
    Format("pack-quantized, 8 bits", compressed("pack-quantized", strategy="group"), packed(False),
           8, scales=torch.float32, ggml="Q8_0"),
    Format("int-quantized", compressed("int-quantized", strategy="channel"), integers(False), 8, 0,
           scales=torch.bfloat16, ggml="Q8_0"),
    Format("int-quantized, zeros", compressed("int-quantized", strategy="channel"), integers(True),
           8, 0, zeros=True),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Floats:
    """An fp8 format. block: (rows, columns) to a scale; None = all columns."""

    name: str
    config: dict[str, Any]
    scale_name: str
    block: tuple[int, int] | None = None
    one: bool = False
    scales: torch.dtype = torch.float32


FLOATS = (
    Floats("float-quantized, channel",
           compressed("float-quantized", type="float", strategy="channel"), "weight_scale",
           (1, 64), scales=torch.bfloat16),
    Floats("float-quantized, tensor",
           compressed("float-quantized", type="float", strategy="tensor"), "weight_scale",
           one=True),
    Floats("float-quantized, block",
           compressed("float-quantized", type="float", strategy="block",
                      block_structure=[32, 32]), "weight_scale", (32, 32)),
    Floats("fp8, blocks", {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic",
                           "weight_block_size": [48, 32]}, "weight_scale_inv", (48, 32)),
    Floats("fp8, scales of a byte", {"quant_method": "fp8", "scale_fmt": "ue8m0",
                                     "weight_block_size": [32, 32]}, "weight_scale_inv", (32, 32),
           scales=torch.float8_e8m0fnu),
    Floats("fp8, tensor", {"quant_method": "fp8", "activation_scheme": "static"}, "weight_scale",
           one=True),
)  # fmt: skip


def numbers(weight: Tensor, form: Format, generator: torch.Generator) -> Numbers:
    """A matrix rounded to what a format can hold."""
    outputs, inputs = weight.shape
    group = form.group or inputs
    groups = inputs // group
    group_of = torch.arange(inputs) // group
    if form.ordered:
        group_of = group_of[torch.randperm(inputs, generator=torch.Generator().manual_seed(7))]
    half = 1 << (form.bits - 1)
    scale = (weight.abs().amax(1, keepdim=True) / half).expand(outputs, groups)
    spread = 1 + torch.rand(outputs, groups, generator=generator)
    # To eight bits, which every dtype of scales holds.
    scale = (scale * spread).to(torch.bfloat16).to(form.scales)
    zero = torch.full((outputs, groups), half)
    if form.zeros:
        shape = (outputs, groups)
        zero = torch.randint(0, 2 * half, shape, generator=generator)
    q = weight / scale.float()[:, group_of] + zero[:, group_of]
    return Numbers(q.round().long().clamp(0, 2 * half - 1), zero, scale.contiguous(), group_of)


def floats(weight: Tensor, form: Floats) -> tuple[dict[str, Tensor], Tensor]:
    """A matrix in fp8: its tensors, and what they mean, block by block."""
    outputs, inputs = weight.shape
    rows, columns = form.block or (outputs, inputs)
    peaks = [
        [weight[r : r + rows, c : c + columns].abs().max() for c in range(0, inputs, columns)]
        for r in range(0, outputs, rows)
    ]
    scale = (torch.tensor(peaks) / 448).to(form.scales)
    means = torch.empty_like(weight)
    stored = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    for r in range(outputs):
        for c in range(0, inputs, columns):
            by = scale[r // rows, c // columns].float()
            part = (weight[r, c : c + columns] / by).clamp(-448, 448).to(torch.float8_e4m3fn)
            stored[r, c : c + columns] = part
            means[r, c : c + columns] = part.float() * by
    tensors = {"weight": stored, form.scale_name: scale.reshape(()) if form.one else scale}
    if form.one:
        tensors["input_scale"] = torch.tensor(0.5)
    return tensors, means


def write(path: Path, form: Format | Floats) -> MemoryCheckpoint:
    """A one-layer model at `path`; returns the plain one it means."""
    small = {"num_hidden_layers": 1, "intermediate_size": 64}
    whole = tiny_checkpoint("llama", 3, **small)
    generator = torch.Generator().manual_seed(5)
    stored: dict[str, Tensor] = {}
    plain = dict(whole.tensors)
    for name, held in whole.tensors.items():
        if not name.endswith("_proj.weight"):
            stored[name] = held
            continue
        base = name.removesuffix("weight")
        if isinstance(form, Floats):
            parts, plain[name] = floats(held, form)
        else:
            made = numbers(held, form, generator)
            parts, plain[name] = form.store(made, form.bits), made.means
        stored |= {base + part: tensor for part, tensor in parts.items()}
    path.mkdir(parents=True, exist_ok=True)
    config = tiny_config("llama", **small, quantization_config=form.config)
    (path / "config.json").write_text(json.dumps(config))
    save_file(stored, path / "model.safetensors")
    return MemoryCheckpoint(whole.config, plain)
