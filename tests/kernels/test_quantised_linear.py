"""Products with matrices held as codes: Triton's programs against plain torch.

Sizes are small, odd where they may be. Everything behind the rows and inputs of a matrix is NaN or
a code that would be seen in a sum.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from spec_serve.kernels.quantised import Codes, pack, piece_of, stacked, unpack
from tests.kernels.interpreted import DEVICE

from spec_serve.kernels import quantised_linear as kernel  # isort: skip

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@dataclass(frozen=True, slots=True)
class Case:
    name: str
    kind: str
    outputs: int
    inputs: int
    group: int
    zeros: bool = False
    ordered: bool = False
    splits: int = 1
    dtype: torch.dtype = torch.float32
    bias: bool = False


CASES = [
    Case("4 bits, groups of 32", "int4", 70, 96, 32, zeros=True),
    Case("4 bits, groups of 128, split", "int4", 64, 512, 128, splits=3, dtype=torch.bfloat16),
    Case("4 bits, one group, zeros", "int4", 33, 192, 192, zeros=True, bias=True),
    Case("4 bits, in another order", "int4", 48, 128, 64, zeros=True, ordered=True, splits=2),
    Case("8 bits, last group cut short", "int8", 40, 100, 32, zeros=True, dtype=torch.float16),
    Case("8 bits, a scale per output", "int8", 33, 200, 200, splits=2, bias=True),
    Case("8 bits, groups of 16", "int8", 16, 80, 16, dtype=torch.bfloat16),
    Case("fp8, a scale per output", "fp8", 20, 130, 130, dtype=torch.bfloat16, bias=True),
    Case("fp8, blocks of 128", "fp8", 64, 300, 128, splits=2),
]


def made(case: Case) -> tuple[Codes, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    shape = (case.outputs, case.inputs)
    groups = -(-case.inputs // case.group)
    top = 16 if case.kind == "int4" else 256
    codes = torch.randint(0, top, shape, generator=generator).to(torch.uint8)
    if case.kind == "fp8":
        every = torch.arange(256, dtype=torch.uint8)  # each value there is, but for the NaNs
        every = every[every.view(torch.float8_e4m3fn).float().isfinite()]
        codes = every[torch.randint(0, len(every), shape, generator=generator)]
        codes.view(-1)[: len(every)] = every
    if case.kind == "int4":
        codes = pack(codes, piece_of(case.group, case.inputs))
    zero = torch.randint(0, top, (case.outputs, groups), generator=generator).to(torch.uint8)
    held = Codes(
        case.kind,
        codes,
        (torch.rand(case.outputs, groups, generator=generator) + 0.5) / top,
        case.group,
        case.inputs,
        zero if case.zeros else None,
        0 if case.kind == "fp8" else top // 2,
        torch.randperm(case.inputs, generator=generator) if case.ordered else None,
    ).to(DEVICE)
    return held, torch.randn(case.outputs, generator=generator).to(DEVICE) if case.bias else None


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equals_torch_and_a_row_keeps_its_bits(case: Case) -> None:
    codes, bias = made(case)
    product = kernel.QuantisedProduct(codes, 8, case.splits)
    padded = torch.full((45, case.inputs + 3), float("nan"), dtype=case.dtype, device=DEVICE)
    padded[:40, : case.inputs] = torch.randn(40, case.inputs, device=DEVICE).to(case.dtype)
    x = padded[:40, : case.inputs]
    got = product(x, None if bias is None else bias.to(case.dtype))
    wide = x.double() @ codes.weight().double().T
    if bias is not None:
        wide = wide + bias.to(case.dtype)
    error = (got.double() - wide).abs().max() / wide.abs().max()
    assert error < TOLERANCE[case.dtype]
    for first, last in ((0, 1), (3, 24)):
        alone = product(x[first:last], None if bias is None else bias.to(case.dtype))
        assert torch.equal(alone, got[first:last]), (first, last)
    assert torch.equal(product.plain(torch.float32), codes.weight())


def test_many_rows_meet_a_plain_copy() -> None:
    codes, bias = made(CASES[0])
    x = torch.randn(kernel.MANY + 1, codes.inputs, device=DEVICE)
    got = kernel.QuantisedProduct(codes, 1)(x, bias)
    assert torch.allclose(got, x @ codes.weight().T, atol=1e-5)
    assert kernel.QuantisedProduct(codes, 1)(x[:0]).shape == (0, codes.outputs)


def test_packing_and_joining() -> None:
    codes = torch.randint(0, 16, (5, 128)).to(torch.uint8)
    for piece in (32, 64, 128):
        assert torch.equal(unpack(pack(codes, piece), piece), codes)
    a, b = made(CASES[0])[0], made(CASES[2])[0]
    both = stacked([a, a, b])
    assert [part.outputs for part in both] == [2 * a.outputs, b.outputs]
    assert torch.equal(both[0].weight(), torch.cat((a.weight(), a.weight())))
    short = made(Case("", "int8", 8, 48, 24))[0]
    assert not kernel.fits(short)
