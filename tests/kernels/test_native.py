"""Compiled linear maps: what they multiply, and that company changes no bit."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from torch import Tensor

from spec_serve.kernels.cpu import native
from spec_serve.kernels.cpu.native import FORMS, ISAS, Arena, PackedMatrix, Pool, fits

OUTPUTS, INPUTS = 88, 512  # not a multiple of a group's 16 rows


def stored(kind: str, outputs: int = OUTPUTS, inputs: int = INPUTS) -> tuple[Tensor, Tensor]:
    """Blocks as a file holds them, and the weights they mean."""
    which = gguf.GGMLQuantizationType[kind]
    rng = np.random.default_rng(len(kind))
    weights = (0.05 * rng.standard_normal((outputs, inputs))).astype(np.float32)
    if kind.endswith("_K"):  # the package does not quantise these: any bits with sane scales
        size, nbytes = gguf.GGML_QUANT_SIZES[which]
        blocks = outputs * inputs // size
        raw = rng.integers(0, 256, (blocks, nbytes), dtype=np.uint8)
        scale = (0.0005 + 0.001 * rng.random(blocks)).astype(np.float16)
        at = 208 if kind == "Q6_K" else 0
        raw[:, at : at + 2] = scale.view(np.uint8).reshape(-1, 2)
        if kind != "Q6_K":
            raw[:, 2:4] = (scale / 2).view(np.uint8).reshape(-1, 2)
        raw = raw.reshape(outputs, -1)
    else:
        raw = quants.quantize(weights, which)
    meant = torch.from_numpy(quants.dequantize(raw, which).reshape(outputs, inputs))
    return torch.from_numpy(np.ascontiguousarray(raw).reshape(-1)), meant


@pytest.fixture(scope="module")
def pool() -> Pool:
    return Pool(2)


def here() -> list[str]:
    return [name for name in ISAS if native.isa(name) == name]


def test_there_is_something_better_than_plain_loops_or_a_reason() -> None:
    assert native.isa() in ISAS and "generic" in here()
    assert native.isa("sse9") == ""


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_rows_are_the_weights_the_file_means(kind: str, pool: Pool) -> None:
    raw, meant = stored(kind)
    packed = PackedMatrix(kind, raw, OUTPUTS, INPUTS, pool)
    rows = torch.stack([packed.row(i) for i in range(OUTPUTS)])
    # Scales of the K types are products, rounded to half precision.
    tolerance = 1e-3 if kind.endswith("_K") else 0.0
    assert ((rows - meant).abs() <= tolerance * meant.abs().max()).all()


@pytest.mark.parametrize("kind", sorted(FORMS))
@pytest.mark.parametrize(("planes", "error"), [(1, 1e-2), (2, 5e-4)])
def test_products_are_right_to_the_activations_bits(
    kind: str, planes: int, error: float, pool: Pool
) -> None:
    raw, meant = stored(kind)
    bias = torch.randn(OUTPUTS, generator=torch.Generator().manual_seed(1))
    packed = PackedMatrix(kind, raw, OUTPUTS, INPUTS, pool, bias)
    x = torch.randn(13, INPUTS, generator=torch.Generator().manual_seed(2))
    wanted = x @ meant.T + bias
    for isa in here():
        found = packed.linear(x, pool, isa, planes)
        assert ((found - wanted).norm() / wanted.norm()).item() < error


@pytest.mark.parametrize("kind", sorted(FORMS))
def test_whole_numbers_are_exact(kind: str, pool: Pool) -> None:
    """Activations that eight bits hold leave only the rounding of float sums."""
    raw, _ = stored(kind)
    packed = PackedMatrix(kind, raw, OUTPUTS, INPUTS, pool)
    meant = torch.stack([packed.row(i) for i in range(OUTPUTS)])
    x = torch.randint(-127, 128, (5, INPUTS), generator=torch.Generator().manual_seed(3)).float()
    x[:, ::32] = 127.0  # so that each block's scale is 1
    wanted = x.double() @ meant.double().T
    for isa in here():
        error = (packed.linear(x, pool, isa, 1).double() - wanted).abs().max()
        assert error <= 1e-5 * wanted.abs().max()


@pytest.mark.parametrize("planes", [1, 2])
@pytest.mark.parametrize("kind", sorted(FORMS))
def test_bits_hang_on_neither_company_nor_threads_nor_instruction_set(
    kind: str, planes: int
) -> None:
    raw, _ = stored(kind)
    one, three = Pool(1), Pool(3)
    packed = PackedMatrix(kind, raw, OUTPUTS, INPUTS, one)
    x = torch.randn(21, INPUTS, generator=torch.Generator().manual_seed(4))
    x[7] = 0.0
    alone = torch.cat(
        [packed.linear(x[i : i + 1], one, "generic", planes) for i in range(len(x))]
    )
    for isa in here():
        for threads in (one, three):
            assert torch.equal(packed.linear(x, threads, isa, planes), alone)
        for n in (2, 3, 5, 12):
            assert torch.equal(packed.linear(x[:n], one, isa, planes), alone[:n])


def test_rows_can_be_taken_in_another_order(pool: Pool) -> None:
    raw, _ = stored("Q4_1")
    order = torch.randperm(OUTPUTS, generator=torch.Generator().manual_seed(5))
    plain = PackedMatrix("Q4_1", raw, OUTPUTS, INPUTS, pool)
    mixed = PackedMatrix("Q4_1", raw, OUTPUTS, INPUTS, pool, rows=order)
    for i, row in enumerate(order.tolist()):
        assert torch.equal(mixed.row(i), plain.row(row))


def test_what_does_not_fit_is_refused_by_name(pool: Pool) -> None:
    assert "IQ4_XS" in fits("IQ4_XS", 16, 32)
    assert "multiple of 32" in fits("Q4_0", 16, 48)
    with pytest.raises(ValueError, match="multiple of 32"):
        PackedMatrix("Q4_0", torch.zeros(100, dtype=torch.uint8), 16, 48, pool)


def test_an_arenas_pieces_are_zero_aligned_and_apart() -> None:
    arena = Arena()
    pieces = [arena.take(n) for n in (1, 100, 64, Arena.CHUNK + 1, 7)]
    for i, piece in enumerate(pieces):
        assert piece.data_ptr() % 64 == 0 and not piece[: 1 << 16].any() and not piece[-1]
        piece[:64] = i + 1
    assert [int(piece[0]) for piece in pieces] == [1, 2, 3, 4, 5]
    assert [len(piece) for piece in pieces[:3]] == [64, 128, 64]


def test_memory_is_little_more_than_the_files(pool: Pool) -> None:
    for kind, most in (("Q4_0", 1.01), ("Q4_1", 1.01), ("Q4_K", 1.12), ("Q6_K", 1.07),
                       ("Q8_0", 1.01), ("Q5_0", 1.01), ("Q5_1", 1.01), ("Q5_K", 1.1)):  # fmt: skip
        raw, _ = stored(kind, 1024, 512)
        packed = PackedMatrix(kind, raw, 1024, 512, pool)
        assert packed.nbytes - 8192 <= most * raw.numel(), kind
