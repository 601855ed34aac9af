"""The noise is what it claims to be: keyed, uniform, independent, the same on every path."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from spec_serve.kernels import noise
from spec_serve.kernels.noise import bits, gumbel, gumbel_of, host_noise, mix_seed
from tests.late import Late

stats = Late("scipy.stats")

EULER = 0.5772156649
EDGES = [0, 1, -1, 2**63 - 1, -(2**63), 4711, 0x0123456789ABCDEF, -987654321987654321]


def grid(seeds: list[int], positions: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    pairs = [(s, p) for s in seeds for p in positions]
    return torch.tensor([s for s, _ in pairs]), torch.tensor([p for _, p in pairs])


def splitmix_bits(seed: int, position: int, token: int) -> int:
    """The definition, in Python integers."""
    word, half = (1 << 64) - 1, (1 << 32) - 1

    def mix64(x: int) -> int:
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & word
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & word
        return x ^ (x >> 31)

    def mix32(x: int) -> int:
        x = ((x ^ (x >> 16)) * 0x85EBCA6B) & half
        x = ((x ^ (x >> 13)) * 0xC2B2AE35) & half
        return x ^ (x >> 16)

    gamma = 0x9E3779B97F4A7C15
    key = mix64((mix64((seed + gamma) & word) + position * gamma) & word)
    return mix32(mix32((token + key) & half) ^ (key >> 32))


def test_bits_follow_the_definition() -> None:
    seeds, positions = grid(EDGES, [0, 1, 2, 77, 131072, 2**31 + 5])
    tokens = torch.tensor([0, 1, 2, 255, 49151, 151935], dtype=torch.int32)
    got = bits(seeds, positions, tokens[None, :])
    want = [
        [splitmix_bits(s, p, t) for t in tokens.tolist()]
        for s, p in zip(seeds.tolist(), positions.tolist(), strict=True)
    ]
    assert got.tolist() == want


@pytest.mark.parametrize("vocab", [1, 7, 1000, 70_001])
def test_cpu_path_equals_the_path_of_other_devices(vocab: int) -> None:
    seeds, positions = grid(EDGES[:4], [0, 9])
    tokens = torch.arange(vocab, dtype=torch.int32)
    general = noise._to_gumbel(bits(seeds, positions, tokens[None, :]))
    assert torch.equal(gumbel(seeds, positions, vocab), general)


def test_a_value_depends_on_its_key_only() -> None:
    seeds, positions = grid([5, 6], [1, 2, 3])
    together = gumbel(seeds, positions, 3001)
    for i in range(len(seeds)):
        alone = gumbel(seeds[i : i + 1], positions[i : i + 1], 3001)
        assert torch.equal(alone[0], together[i])
    assert torch.equal(gumbel(seeds, positions, 17), together[:, :17])
    ids = torch.randint(0, 3001, (6, 13), generator=torch.Generator().manual_seed(1))
    assert torch.equal(gumbel_of(seeds, positions, ids), together.gather(1, ids))


def test_host_noise_is_the_same_noise_and_knows_its_largest_values() -> None:
    seeds, positions = grid(EDGES, [0, 3])
    vocab = 60_000
    full = gumbel(seeds, positions, vocab).numpy()
    ids = np.array([0, 7, 7, 59_999, 123])
    for row, one in zip(full, host_noise(seeds, positions), strict=True):
        assert (one.of(ids) == row[ids]).all()
        for least in (8.0, 9.5, 11.0):
            found = one.above(least, vocab)
            assert set(np.flatnonzero(row > least)) <= set(found.tolist())
            assert (row[found] > least - 0.01).all() and len(set(found.tolist())) == len(found)
        assert set(np.flatnonzero(row > 8.0)), "a test without large values shows nothing"


def test_uniform_in_high_and_low_bits() -> None:
    seeds, positions = grid(list(range(8)), list(range(8)))
    values = bits(seeds, positions, torch.arange(4000, dtype=torch.int32)[None, :]).reshape(-1)
    for shift in (24, 12, 0):
        counts = np.bincount(((values >> shift) & 0xFF).numpy(), minlength=256)
        assert stats.chisquare(counts).pvalue > 0.001


def test_neighbouring_keys_are_independent() -> None:
    """Pairs of 4-bit classes of adjacent seeds, positions and tokens fill 256 cells evenly."""
    seeds, positions = grid(list(range(40)), list(range(40)))
    cells = bits(seeds, positions, torch.arange(128, dtype=torch.int32)[None, :]) >> 28
    cells = cells.view(40, 40, 128)
    for axis in range(3):
        low = cells.narrow(axis, 0, cells.shape[axis] - 1)
        high = cells.narrow(axis, 1, cells.shape[axis] - 1)
        counts = np.bincount((low * 16 + high).reshape(-1).numpy(), minlength=256)
        assert stats.chisquare(counts).pvalue > 0.001, f"axis {axis}"


def test_gumbel_moments_and_tail() -> None:
    seeds, positions = grid(list(range(20)), list(range(10)))
    g = gumbel(seeds, positions, 5000).double().reshape(-1)
    n = len(g)
    deviation = math.pi / math.sqrt(6)
    assert abs(g.mean().item() - EULER) < 4 * deviation / math.sqrt(n)
    assert abs(g.var().item() - deviation**2) < 0.02
    assert stats.kstest(g.numpy()[:50_000], "gumbel_r").pvalue > 0.001
    assert torch.isfinite(g).all()


def test_extreme_bits_stay_finite_and_fine() -> None:
    g = noise._to_gumbel(torch.tensor([0, 1, 2, 3, 2**32 - 2, 2**32 - 1]))
    assert torch.isfinite(g).all()
    exact = [-math.log(-math.log1p(-(b + 0.5) / 2**32)) for b in range(4)]
    assert g[:4].tolist() == pytest.approx(exact, rel=1e-6)  # the large values are resolved
    assert (g[:5].diff() < 0).all() and g[5] <= g[4]


def test_arg_max_draws_from_the_softmax() -> None:
    logits = torch.tensor([0.0, 1.0, -2.0, 0.5, 3.0, -6.0])
    n = 40_000
    draws = (logits + gumbel(torch.full((n,), 99), torch.arange(n), 6)).argmax(-1)
    expected = logits.double().softmax(-1).numpy() * n
    assert stats.chisquare(np.bincount(draws.numpy(), minlength=6), expected).pvalue > 0.001


def test_sibling_seeds_differ_and_fit() -> None:
    seeds = {mix_seed(seed, index) for seed in EDGES[1:] for index in range(200)}
    assert len(seeds) == 200 * (len(EDGES) - 1)
    assert all(-(2**63) <= seed < 2**63 for seed in seeds)
    assert mix_seed(2**64 - 1, 3) == mix_seed(-1, 3)
