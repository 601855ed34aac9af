"""Layouts of quantised matrices in files, turned into the one form kernels know, and into ggml's.

Every function takes tensors as they are stored and returns `Codes` (kernels/quantised.py): AWQ's
and GPTQ's words of 32 bits, those of compressed-tensors, bytes with their scales. Nothing is
rounded. `ggml` says which of ggml's types holds a matrix as it is. Knows no files and no names.
"""

from __future__ import annotations

import torch
from torch import Tensor

from spec_serve.kernels.quantised import Codes, pack, piece_of, unpack

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The half byte of a word in which AWQ keeps the first, second, ... of eight outputs."""

_BLOCK = 32  # weights of a ggml block
_CLOSE = 2.0**-11
"""What a scale may lose by becoming a float16: half of its last bit."""


Words = Tensor | tuple[int, int]
"""Codes as they are stored; or their shape alone, where only what a matrix is like is asked."""


class LayoutError(ValueError):
    """Tensors that don't fit each other; the message says which and how."""


def codes_of(words: Tensor, bits: int) -> Tensor:
    """[R, n] int32 -> [R, n * 32 / bits] uint8: each word's half bytes or bytes, the lowest
    first."""
    data = words.contiguous().view(torch.uint8)
    return torch.stack((data & 15, data >> 4), -1).flatten(1) if bits == 4 else data


def _awq_codes(words: Tensor) -> Tensor:
    """[R, n] int32 -> [R, 8 n] uint8, in AWQ's order of half bytes."""
    found = codes_of(words, 4).view(len(words), -1, 8)
    return found[:, :, list(_AWQ_PLACES)].flatten(1)


def awq(qweight: Words, scales: Tensor, qzeros: Tensor | None) -> Codes:
    """AWQ's GEMM layout.

    qweight: [in, out / 8] int32. scales: [groups, out]. qzeros: [groups, out / 8] int32.
    """
    codes: Words
    codes = _awq_codes(qweight).T if isinstance(qweight, Tensor) else (8 * qweight[1], qweight[0])
    zero = None if qzeros is None else _awq_codes(qzeros).T
    return _integers(codes, scales.T, zero, 4, None)


def gptq(
    qweight: Words, scales: Tensor, qzeros: Tensor, g_idx: Tensor | None, less_one: bool
) -> Codes:
    """GPTQ's layout, of four or eight bits.

    qweight: [in * bits / 32, out] int32. scales: [groups, out]. qzeros: [groups, out * bits / 32]
    int32. g_idx: [in], the group of each input. less_one: zeros are stored less one.
    """
    outputs = scales.shape[1]
    bits = qzeros.shape[1] * 32 // max(outputs, 1)
    if bits not in (4, 8) or qzeros.shape[1] * 32 != bits * outputs:
        raise LayoutError(f"qzeros: {list(qzeros.shape)} does not fit scales {list(scales.shape)}")
    zero = codes_of(qzeros, bits)
    if less_one:
        zero = (zero + 1) & (2**bits - 1)
    codes: Words
    if isinstance(qweight, Tensor):
        codes = codes_of(qweight.T, bits)
    else:
        codes = (qweight[1], qweight[0] * 32 // bits)
    return _integers(codes, scales.T, zero.T, bits, g_idx)


def packed(
    words: Words, shape: tuple[int, int], scale: Tensor, zero: Tensor | None, g_idx: Tensor | None
) -> Codes:
    """compressed-tensors' pack-quantized, of four or eight bits.

    words: [out, in * bits / 32] int32, of codes with the sign taken off. shape: (out, in). scale:
    [out, groups], [out, 1] or one. zero: int32, packed along the outputs, or int8 as it is.
    """
    outputs, inputs = shape
    stored = tuple(words.shape) if isinstance(words, Tensor) else words
    bits = next((b for b in (4, 8) if (outputs, -(-inputs * b // 32)) == stored), 0)
    if not bits:
        raise LayoutError(
            f"weight_packed: {list(stored)} does not fit weight_shape {list(shape)} "
            "with 4 or 8 bits"
        )
    scale, _ = per_group(scale, outputs, inputs, None)
    if zero is not None and zero.dtype == torch.int32:
        zero = codes_of(zero.T, bits)[:, :outputs].T
    elif zero is not None:
        zero, _ = per_group(zero, outputs, inputs, None)
        zero = (zero.to(torch.int16) + 2 ** (bits - 1)).to(torch.uint8)
    codes = codes_of(words, bits)[:, :inputs] if isinstance(words, Tensor) else shape
    return _integers(codes, scale, zero, bits, g_idx)


def plain_bytes(
    weight: Words, scale: Tensor, zero: Tensor | None, block: tuple[int, int] | None
) -> Codes:
    """A byte to a weight: int8, or float8 e4m3, beside its scales (see `per_group`).

    weight: [out, in]; a shape alone stands for int8. zero: of the scale's shape, int8.
    """
    outputs, inputs = weight.shape if isinstance(weight, Tensor) else weight
    scale, group = per_group(scale, outputs, inputs, block)
    codes: Words = (outputs, inputs)
    if isinstance(weight, Tensor):
        held = weight.contiguous().view(torch.uint8)
        if weight.dtype == torch.float8_e4m3fn:
            return Codes("fp8", held, scale.contiguous(), group, inputs)
        codes = held ^ 128
    if zero is not None:
        zero, _ = per_group(zero, outputs, inputs, block)
        zero = zero.contiguous().view(torch.uint8) ^ 128
    return _made(codes, scale, zero, 8, group, None)


def per_group(
    scale: Tensor, outputs: int, inputs: int, block: tuple[int, int] | None
) -> tuple[Tensor, int]:
    """Scales as [out, groups], and the inputs to each.

    scale: one; one per output; [out, groups]; or one per `block` of the matrix.
    """
    if scale.numel() == 1:
        return scale.reshape(1, 1).expand(outputs, 1), inputs
    if scale.ndim == 1:
        scale = scale[:, None]
    if block is not None and scale.ndim == 2:
        rows, columns = block
        if scale.shape == (-(-outputs // rows), -(-inputs // columns)):
            return scale.repeat_interleave(rows, 0)[:outputs], min(columns, inputs)
    if scale.ndim == 2 and scale.shape[0] == outputs and inputs % scale.shape[1] == 0:
        return scale, inputs // scale.shape[1]
    raise LayoutError(f"scales {list(scale.shape)} do not fit a matrix [{outputs}, {inputs}]")


def _integers(
    codes: Words, scale: Tensor, zero: Tensor | None, bits: int, g_idx: Tensor | None
) -> Codes:
    """codes [out, in], scale and zero [out, groups]; g_idx [in] or None."""
    outputs, inputs = codes.shape if isinstance(codes, Tensor) else codes
    groups = scale.shape[1]
    if scale.shape[0] != outputs or inputs < groups:
        raise LayoutError(f"scales {list(scale.shape)} do not fit a matrix [{outputs}, {inputs}]")
    if zero is not None and zero.shape != scale.shape:
        raise LayoutError(f"zeros {list(zero.shape)} do not fit scales {list(scale.shape)}")
    group = _length(inputs, groups)
    order = None
    if g_idx is not None:
        if g_idx.shape != (inputs,) or int(g_idx.min()) < 0 or int(g_idx.max()) >= groups:
            raise LayoutError(f"g_idx: does not name one of {groups} groups for {inputs} inputs")
        straight = torch.arange(inputs, device=g_idx.device) // group
        if not torch.equal(g_idx.to(torch.int64), straight):
            order = torch.argsort(g_idx, stable=True)
            if not torch.equal(g_idx[order].to(torch.int64), straight):
                raise LayoutError("g_idx: groups of different sizes")
            codes = codes[:, order] if isinstance(codes, Tensor) else codes
    return _made(codes, scale, zero, bits, group, order)


def _length(inputs: int, groups: int) -> int:
    """Inputs to a group, the last of which may be cut short: a multiple of eight as tools write."""
    group = -(-inputs // groups)
    return group if inputs % groups == 0 else -(-group // 8) * 8


def _made(
    codes: Words, scale: Tensor, zero: Tensor | None, bits: int, group: int, order: Tensor | None
) -> Codes:
    outputs, inputs = codes.shape if isinstance(codes, Tensor) else codes
    offset = 1 << (bits - 1)
    if zero is not None and bool((zero == offset).all()):
        zero = None  # symmetric, as most files are that spell their zeros out
    piece = piece_of(group, inputs)
    kind = "int4" if bits == 4 and piece >= _BLOCK and inputs % piece == 0 else "int8"
    if isinstance(codes, Tensor):
        held = pack(codes.contiguous(), piece) if kind == "int4" else codes.contiguous()
    else:
        width = inputs // 2 if kind == "int4" else inputs
        held = torch.zeros(1, dtype=torch.uint8).expand(outputs, width)
    zero = None if zero is None else zero.contiguous()
    return Codes(kind, held, scale.contiguous(), group, inputs, zero, offset, order)


def ggml_type(codes: Codes) -> str:
    """ggml's type that holds a matrix as it is, but for scales of more bits than float16's; "" if
    there is none."""
    whole = codes.inputs % _BLOCK == 0 and (
        codes.group % _BLOCK == 0 or codes.group >= codes.inputs
    )
    scale = codes.scale.float()
    halves = scale.half().float()
    if codes.order is not None or not whole or codes.kind == "fp8":
        return ""
    if not bool(((halves - scale).abs() <= _CLOSE * scale.abs()).all()):
        return ""
    if codes.kind == "int4":
        return "Q4_0" if codes.zero is None else "Q5_0"
    return "Q8_0" if codes.zero is None and codes.offset == 128 else ""


def ggml_bytes(codes: Codes) -> Tensor:
    """The bytes of a matrix as `ggml_type` says, row by row of blocks. # [bytes] uint8

    A zero point takes a fifth bit: code - zero lies between -15 and 15.
    """
    kind = ggml_type(codes)
    assert kind, "no type of ggml's holds this matrix"
    outputs = codes.outputs
    count = codes.inputs // _BLOCK

    def spread(values: Tensor) -> Tensor:  # [out, groups] -> [out, blocks, 1]
        repeats = min(codes.group, codes.inputs) // _BLOCK
        return values.repeat_interleave(repeats, 1)[:, :count, None]

    scale = spread(codes.scale.half()).view(torch.uint8)  # [out, blocks, 2]
    if kind == "Q8_0":
        return torch.cat((scale, codes.codes.view(outputs, count, _BLOCK) ^ 128), 2).flatten()
    q = unpack(codes.codes, codes.piece).view(outputs, count, _BLOCK)
    if codes.zero is not None:
        q = q + spread(16 - codes.zero)  # bytes wrap around, and back
    low = pack((q & 15).flatten(1), _BLOCK).view(outputs, count, _BLOCK // 2)
    if kind == "Q4_0":
        return torch.cat((scale, low), 2).flatten()
    fifth = (q >> 4).view(outputs, count, 4, 8)
    bits = fifth[..., 0]
    for i in range(1, 8):
        bits = bits | fifth[..., i] << i
    return torch.cat((scale, bits, low), 2).flatten()
