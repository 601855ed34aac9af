"""Quantising plain weights: the gguf package's result, bit for bit."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf import quants

from spec_serve.kernels.cpu.quantise import QUANTISERS


@pytest.mark.parametrize("kind", sorted(QUANTISERS))
def test_equals_the_gguf_package(kind: str) -> None:
    torch.manual_seed(0)
    weight = torch.randn(40, 96) * torch.logspace(-6, 1, 40)[:, None]
    weight[3] = 0.0
    weight[4, :32] = -0.25
    weight[5] = weight[5].round()
    wanted = quants.quantize(weight.numpy(), gguf.GGMLQuantizationType[kind])
    assert bytes(QUANTISERS[kind](weight).numpy()) == wanted.tobytes()
