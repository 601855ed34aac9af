"""Triton's fused programs in its interpreter against the torch code that specifies each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.bench.gpu_cases import bushy
from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import KVPool, KVSpec
from spec_serve.cache.tree import chain, root
from spec_serve.kernels import fused, fused_draw
from spec_serve.kernels.noise import gumbel, gumbel_of
from spec_serve.spec.filters import scaled, survivors
from spec_serve.spec.verify import Verdict, walk
from spec_serve.target.layers import RMSNorm
from spec_serve.target.rope import rotate
from tests.kernels.interpreted import DEVICE


@pytest.fixture(autouse=True)
def on_the_device() -> Iterator[None]:
    with torch.device(DEVICE):
        yield


HALVES = [torch.float32, torch.float16, torch.bfloat16]


def close(got: Tensor, wanted: Tensor) -> bool:
    """Equal but for the last bit; in bfloat16 for two, as the interpreter cuts where it should
    round, twice in a row."""
    bits = {torch.float32: 2**-20, torch.float16: 2**-10, torch.bfloat16: 2**-5}[wanted.dtype]
    assert got.dtype == wanted.dtype
    return torch.allclose(got.float(), wanted.float(), rtol=bits, atol=bits)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("width", [1, 64, 80])
def test_norms(dtype: torch.dtype, width: int) -> None:
    x, more = torch.randn(2, 3, 2 * width).to(dtype)[:, :, :width]
    for weight in (torch.randn(width).to(dtype), torch.randn(width)):
        norm = RMSNorm(weight, 1e-5)
        norm.widen = dtype != torch.float32
        assert close(fused.rms_norm(x, weight, 1e-5), norm(x))
        y, added = fused.add_rms_norm(x, more, weight, 1e-5)
        assert close(added, x + more) and close(y, norm(added))


@pytest.mark.parametrize("dtype", HALVES)
def test_gate(dtype: torch.dtype) -> None:
    both = (torch.randn(3, 2 * 1100) * 3).to(dtype)
    gate, up = both.chunk(2, -1)
    assert close(fused.silu_mul(both), F.silu(gate) * up)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_and_store(dtype: torch.dtype, normed: bool) -> None:
    nodes, heads, kv_heads, dim = 3, 4, 2, 80
    qkv = torch.randn(nodes, (heads + 2 * kv_heads) * dim).to(dtype)
    angles = torch.randn(nodes, 1, dim)
    rotation = angles.cos().to(dtype), angles.sin().to(dtype)
    pool = KVPool([KVSpec(kv_heads, dim, dtype)], 9, 1, 5, DEVICE)
    kv, slots = pool.layers[0], torch.tensor([5, 2, 7])
    norms = (torch.randn(dim).to(dtype), torch.randn(dim).to(dtype)) if normed else None
    got = fused.rope_and_store(qkv, rotation, kv, slots, heads, norms, 1e-6)
    q, k, v = qkv.view(nodes, -1, dim).split_with_sizes([heads, kv_heads, kv_heads], 1)
    if norms is not None:
        q, k = RMSNorm(norms[0], 1e-6)(q), RMSNorm(norms[1], 1e-6)(k)
    assert close(got, rotate(q, rotation)) and close(kv.k[slots], rotate(k, rotation))
    assert torch.equal(kv.v[slots], v)
    untouched = [i for i in range(10) if i not in slots.tolist()]
    assert not kv.k[untouched].any() and not kv.v[untouched].any()


def drawn(batch: TreeBatch, seed: int) -> Tensor:
    """Tokens at the nodes with logits, most of them one of the node's guesses."""
    pick = np.random.default_rng(seed)
    chosen = torch.full((len(batch.logits_at),), 999)
    for i, node in enumerate(batch.logits_at.tolist()):
        guesses = torch.nonzero((batch.parents == node) & (batch.given == 0)).flatten().tolist()
        if guesses and pick.random() < 0.85:
            chosen[i] = batch.tokens[pick.choice(guesses)]
    return chosen


@pytest.mark.parametrize("seed", range(3))
def test_walk_and_table(seed: int) -> None:
    """Given chains, deep trees, forced tokens, rows without logits; and what the table gets."""
    trees = [bushy(90, seed), root(3), bushy(20, seed + 9, 4), chain(range(70)), chain(range(9), 2)]
    twigs, slot = [], 1
    for row, tree in enumerate(trees):
        n = len(tree)
        wanted_from = n if row == 3 else tree.given - 1
        forced = {1: 2} if row == 4 else {}
        twigs.append(Twig(row, 5 * row, tree, range(slot, slot + n), wanted_from, forced))
        slot += n
    batch = build_batch(twigs, DEVICE)
    chosen = drawn(batch, seed)
    verdict = walk(batch, chosen, 30)
    assert int(verdict.accepted.max()) > 1, "a walk that goes nowhere shows nothing"
    got = Verdict(*fused.walk(batch, chosen, 30))
    for name in ("path", "accepted", "leaf", "bonus"):
        assert torch.equal(getattr(got, name), getattr(verdict, name)), name
    shallow = Verdict(*fused.walk(batch, chosen, 0))
    assert shallow.path.shape == (5, 0) and int(shallow.accepted.sum()) == 0

    table = torch.full((5, 96), -7)
    expected = table.clone()
    replays = torch.zeros(len(batch), dtype=torch.int64)
    replays[batch.node_ptr[2]] = 1
    following = torch.tensor([901, 0, 903, 904, 905])
    kept = batch.given.clone()
    kept[verdict.path[verdict.path >= 0]] = 1
    for i in torch.nonzero(kept * (1 - replays)).flatten().tolist():
        expected[batch.row_ids[batch.row_of[i]], batch.positions[i]] = batch.slots[i]
    for b in (0, 2, 3, 4):
        expected[b, batch.positions[verdict.leaf[b]] + 1] = following[b]
    fused.settle(batch, got.path, got.leaf, following, table, replays)
    assert torch.equal(table, expected)


def random_masks(rows: int, vocab: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    """Masks for two of three rows, and which ids each row may have [rows, vocab]."""
    bits = torch.randint(-(2**63), 2**63 - 1, (2, -(-vocab // 64) - 1))  # ids behind are excluded
    which = torch.arange(rows) % 3 - 1
    spread = ((bits.unsqueeze(-1) >> torch.arange(64)) & 1).flatten(1).bool()
    allowed = F.pad(spread, (0, vocab - spread.shape[1]))
    return (which, bits), torch.where((which >= 0)[:, None], allowed[which.clamp(min=0)], True)


def keys(rows: int) -> tuple[Tensor, Tensor]:
    return torch.randint(-(2**63), 2**63 - 1, (rows,)), torch.randint(0, 1 << 20, (rows,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_draw(dtype: torch.dtype) -> None:
    """Several stretches of the vocabulary; greedy rows, ties and rows where nothing is allowed."""
    rows, vocab = 6, 5000
    logits = (torch.randn(rows, vocab + 3) * 3).to(dtype)[:, :vocab]
    logits[3] = logits[3].round()
    temperature = torch.tensor([0.0, 0.7, 1.3, 0.0, 1e-3, 3.0], dtype=torch.float64)
    seeds, positions = keys(rows)
    masks, allowed = random_masks(rows, vocab)
    x = logits.float().masked_fill(~allowed, float("-inf"))
    warm = temperature[:, None] > 0
    noisy = scaled(x, temperature.where(temperature > 0, 1.0)) + gumbel(seeds, positions, vocab)
    wanted = torch.where(warm, noisy, x).argmax(-1)
    assert torch.equal(fused_draw.draw(logits, temperature, seeds, positions, masks), wanted)
    bare = fused_draw.draw(torch.full((1, 9), float("-inf")), temperature[:1], seeds[:1], seeds[:1])
    assert bare.tolist() == [0]


def test_noise_is_that_of_all_devices() -> None:
    """One draw over many rows finds the arg-max of the noise itself: all 64 bits of the keys."""
    seeds, positions = keys(40)
    got = fused_draw.draw(torch.zeros(40, 700), torch.ones(40).double(), seeds, positions)
    assert torch.equal(got, gumbel(seeds, positions, 700).argmax(-1))


@pytest.mark.parametrize("rounded", [False, True])
def test_draw_filtered(rounded: bool) -> None:
    """Each filter alone and together, at their ends, with ties across the cut and with masks."""
    limits = [  # top_k, top_p, min_p
        (0, 0.9, 0.0), (1, 1.0, 0.0), (5, 0.5, 0.0), (40, 0.3, 0.05), (299, 0.99, 0.0),
        (7, 0.0, 0.0), (0, 1.0, 0.2), (300, 1.0, 0.0), (0, 1e-9, 1.0), (12, 0.8, 0.01),
    ]  # fmt: skip
    rows, vocab = len(limits), 300
    top_k = torch.tensor([k for k, _, _ in limits])
    top_p = torch.tensor([p for _, p, _ in limits], dtype=torch.float64)
    min_p = torch.tensor([m for _, _, m in limits], dtype=torch.float64)
    temperature = torch.rand(rows, dtype=torch.float64) * 3 + 0.1
    logits = torch.randn(rows, vocab) * 3
    if rounded:
        logits = logits.round()
    seeds, positions = keys(rows)
    masks, allowed = random_masks(rows, vocab)
    x = logits.masked_fill(~allowed, float("-inf"))
    limited = torch.where(top_k < vocab, top_k, 0)
    ids, z = survivors(x, temperature, limited, top_p, min_p, 0)
    noisy = z + gumbel_of(seeds, positions, ids)
    wanted = ids.masked_fill(noisy < noisy.amax(-1, keepdim=True), vocab).amin(-1)
    got = fused_draw.draw_filtered(
        logits, temperature, seeds, positions, top_k, top_p, min_p, masks
    )
    assert torch.equal(got, wanted)
