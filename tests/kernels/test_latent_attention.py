"""Triton's tree attention with values narrower than keys, in its interpreter, against torch."""

from __future__ import annotations

import pytest
import torch

from spec_serve.bench.gpu_cases import Case, bushy, make
from spec_serve.cache.pool import LayerKV
from spec_serve.cache.tree import chain, root
from spec_serve.kernels.reference import TorchAttention
from spec_serve.kernels.tree_attention import Shape, TritonAttention, default_tile
from spec_serve.kernels.tuning import Tile
from tests.kernels.interpreted import DEVICE

ROWS = ((70, root(2)), (3, bushy(7, 1)), (9, chain(range(3))))


@pytest.mark.parametrize(("heads", "latent", "tail"), [(4, 64, 16), (24, 48, 24)])
def test_latents_equal_the_reference(heads: int, latent: int, tail: int) -> None:
    """A split prefix, a tree, a chain, NaN in slots that are nobody's, heads over programs."""
    problem = make(Case("latent", ROWS, heads, 1, latent + tail), DEVICE)
    outs, pools = [], []
    for backend in (TritonAttention(4, lambda _: Tile(16, 16, 4, 2)), TorchAttention()):
        k = problem.kv.k.clone()
        kv = LayerKV(k, k[:, :, :latent])
        plan = backend.plan(problem.batch, problem.table)
        new = problem.k
        outs.append(plan.attend(problem.q, new, new[:, :, :latent], kv, scale=0.1))
        pools.append(k)
    assert outs[0].shape == (len(problem.batch), heads, latent)
    torch.testing.assert_close(outs[0], outs[1], rtol=0, atol=3e-6)
    torch.testing.assert_close(pools[0], pools[1], rtol=0, atol=0, equal_nan=True)


def test_tiles_of_wide_sums_are_small() -> None:
    for kind in ("root", "tree", "chunk"):
        tile = default_tile(Shape(128, 8, 512, torch.bfloat16, kind, 64))
        assert tile.lines <= 32 and tile.keys == 16
