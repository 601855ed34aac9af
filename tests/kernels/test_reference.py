"""The torch attention against an oracle that looks at one node and one key at a time."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import KVPool, KVSpec
from spec_serve.cache.tree import TokenTree, chain, root
from spec_serve.kernels.reference import TorchAttention

HEADS, KV_HEADS, DIM = 6, 2, 16
SCALE = 0.3


def bushy(nodes: int, seed: int) -> TokenTree:
    """A random tree below one given node."""
    generator = torch.Generator().manual_seed(seed)
    parents = [-1]
    for i in range(1, nodes):
        parents.append(int(torch.randint(max(0, i - 6), i, (), generator=generator)))
    return TokenTree(list(range(nodes)), parents, 1)


def filled_pool(dtype: torch.dtype, slots: int, rows: int, positions: int) -> KVPool:
    pool = KVPool([KVSpec(KV_HEADS, DIM, dtype)], slots, rows, positions)
    pool.layers[0].k.normal_()
    pool.layers[0].v.normal_()
    pool.layers[0].k[0] = pool.layers[0].v[0] = float("nan")  # whoever reads TRASH will show it
    return pool


def expected(
    q: Tensor,
    pool: KVPool,
    twigs: Sequence[Twig],
    first: int = 0,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Attention of every node of `twigs` over what lies in the pool, node by node, in float64."""
    k, v = pool.layers[0].k.double(), pool.layers[0].v.double()
    outs = []
    for twig in twigs:
        depths = twig.tree.depths()
        for node in range(len(twig.tree)):
            here = twig.prefix + depths[node]
            keys = [(p, int(pool.table[twig.row, p])) for p in range(first, twig.prefix)]
            keys += [(twig.prefix + depths[a], twig.slots[a]) for a in twig.tree.path(node)]
            slots = [s for p, s in keys if window is None or here - p < window]
            out = torch.empty(HEADS, DIM, dtype=torch.float64)
            for h in range(HEADS):
                group = h // (HEADS // KV_HEADS)
                scores = k[slots, group] @ q[len(outs), h].double() * SCALE
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                out[h] = scores.softmax(0) @ v[slots, group]
            outs.append(out)
    return torch.stack(outs)


def mixed_twigs(pool: KVPool) -> list[Twig]:
    """A long chain without prefix, a tree of 31, a tree of 70 (two words), roots, a short chain."""
    free = list(range(1, pool.slots + 1))
    twigs = []
    for row, (prefix, tree, scattered) in enumerate(
        [
            (0, chain(range(130)), False),
            (23, bushy(31, 1), True),
            (9, bushy(70, 2), False),
            (40, root(7), True),
            (1, chain(range(5)), True),
            (0, root(3), False),
        ]
    ):
        taken = free[: prefix + len(tree)]
        del free[: len(taken)]
        if scattered:
            taken = taken[::-1]
        pool.assign(row, 0, taken[:prefix])
        twigs.append(Twig(row, prefix, tree, taken[prefix:], 0))
    return twigs


def random_qkv(count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    qkv = torch.randn(count, HEADS + 2 * KV_HEADS, DIM).to(dtype)
    return qkv[:, :HEADS], qkv[:, HEADS : HEADS + KV_HEADS], qkv[:, HEADS + KV_HEADS :]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 1, 4, 300])
def test_ragged_mix(window: int | None, softcap: float | None, exact: bool) -> None:
    pool = filled_pool(torch.float32, 400, 6, 160)
    twigs = mixed_twigs(pool)
    batch = build_batch(twigs)
    q, k, v = random_qkv(len(batch), torch.float32)
    plan = TorchAttention(exact).plan(batch, pool.table)
    out = plan.attend(q, k, v, pool.layers[0], scale=SCALE, window=window, softcap=softcap)
    assert torch.equal(pool.layers[0].k[batch.slots], k)
    assert torch.equal(pool.layers[0].v[batch.slots], v)
    wanted = expected(q, pool, twigs, window=window, softcap=softcap)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)


@pytest.mark.parametrize(("dtype", "error"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_half_precision(dtype: torch.dtype, error: float, softcap: float | None) -> None:
    pool = filled_pool(dtype, 400, 6, 160)
    twigs = mixed_twigs(pool)
    batch = build_batch(twigs)
    q, k, v = random_qkv(len(batch), dtype)
    plan = TorchAttention().plan(batch, pool.table)
    out = plan.attend(q, k, v, pool.layers[0], scale=SCALE, softcap=softcap)
    assert out.dtype == dtype
    wanted = expected(q, pool, twigs, softcap=softcap)
    torch.testing.assert_close(out.double(), wanted, rtol=error, atol=error)


@pytest.mark.parametrize("window", [None, 3])
def test_first_hides_the_oldest_positions(window: int | None) -> None:
    pool = filled_pool(torch.float32, 200, 3, 80)
    twigs = [
        Twig(0, 12, bushy(9, 3), range(101, 110), 0),
        Twig(1, 1, root(1), [120], 0),
        Twig(2, 6, chain(range(4)), range(130, 134), 0),
    ]
    pool.assign(0, 0, range(1, 13))
    pool.table[:, 0] = 0  # position 0 holds nothing: TRASH is NaN
    pool.assign(1, 1, [50])
    pool.assign(2, 1, range(60, 65))
    batch = build_batch(twigs)
    q, k, v = random_qkv(len(batch), torch.float32)
    plan = TorchAttention().plan(batch, pool.table, first=1)
    out = plan.attend(q, k, v, pool.layers[0], scale=SCALE, window=window)
    wanted = expected(q, pool, twigs, first=1, window=window)
    torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)


def growing(whole: TreeBatch, counts: Sequence[int]) -> TreeBatch:
    """Only the last counts[b] nodes of each row's twig as queries."""
    ends = whole.node_ptr.tolist()
    keep = [i for b, n in enumerate(counts) for i in range(ends[b + 1] - n, ends[b + 1])]
    index = torch.tensor(keep)
    rows = len(counts)
    return replace(
        whole,
        tokens=whole.tokens[index],
        positions=whole.positions[index],
        parents=torch.full((len(keep),), -1),
        slots=whole.slots[index],
        row_of=whole.row_of[index],
        ancestors=whole.ancestors[index],
        given=whole.given[index],
        logit_of=torch.arange(len(keep)),
        logits_at=torch.arange(len(keep)),
        node_ptr=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]),
        chain=torch.zeros(rows, dtype=torch.int64),
    )


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_growing_reads_older_nodes_from_the_pool(window: int | None, softcap: float | None) -> None:
    pool = filled_pool(torch.float32, 400, 6, 160)
    twigs = [t for t in mixed_twigs(pool) if len(t.tree) in (31, 70)]
    whole = build_batch(twigs)
    q, k, v = random_qkv(len(whole), torch.float32)
    backend = TorchAttention()
    kinds = {"scale": SCALE, "window": window, "softcap": softcap}
    every = backend.plan(whole, pool.table).attend(q, k, v, pool.layers[0], **kinds)
    for counts in ([4, 9], [1, 1], [31, 70]):
        part = growing(whole, counts)
        index = torch.cat(
            (torch.arange(31)[31 - counts[0] :], 31 + torch.arange(70)[70 - counts[1] :])
        )
        out = backend.plan(part, pool.table).attend(
            q[index], k[index], v[index], pool.layers[0], **kinds
        )
        torch.testing.assert_close(out, every[index], rtol=0, atol=2e-6)


@pytest.mark.parametrize("exact", [False, True])
def test_neighbours_change_no_bit(exact: bool) -> None:
    pool = filled_pool(torch.float32, 400, 6, 160)
    twigs = mixed_twigs(pool)
    batch = build_batch(twigs)
    q, k, v = random_qkv(len(batch), torch.float32)
    backend = TorchAttention(exact)
    together = backend.plan(batch, pool.table).attend(q, k, v, pool.layers[0], scale=SCALE)
    start = 0
    for twig in twigs:
        rows = slice(start, start + len(twig.tree))
        start = rows.stop
        alone = backend.plan(build_batch([twig]), pool.table).attend(
            q[rows], k[rows], v[rows], pool.layers[0], scale=SCALE
        )
        assert torch.equal(alone, together[rows])


def test_exact_makes_trees_and_chains_agree_bit_for_bit() -> None:
    pool = filled_pool(torch.float32, 400, 2, 160)
    pool.assign(0, 0, range(1, 101))
    tree = bushy(40, 5)
    twig = Twig(0, 100, tree, range(201, 241), 0)
    q, k, v = random_qkv(40, torch.float32)
    backend = TorchAttention(exact=True)
    out = backend.plan(build_batch([twig]), pool.table).attend(q, k, v, pool.layers[0], scale=SCALE)
    for node in range(40):
        path = tree.path(node)
        pool.assign(1, 0, [*range(1, 101), *(201 + a for a in path[:-1])])
        alone = build_batch([Twig(1, 100 + len(path) - 1, root(0), [201 + node], 0)])
        one = slice(node, node + 1)
        got = backend.plan(alone, pool.table).attend(
            q[one], k[one], v[one], pool.layers[0], scale=SCALE
        )
        assert torch.equal(got[0], out[node])


def test_plan_serves_layers_of_different_kinds() -> None:
    """One plan, several windows and layers: nothing of one call leaks into the next."""
    pool = filled_pool(torch.float32, 400, 6, 160)
    twigs = mixed_twigs(pool)
    batch = build_batch(twigs)
    plan = TorchAttention().plan(batch, pool.table)
    for window in (None, 4, None, 7):
        q, k, v = random_qkv(len(batch), torch.float32)
        out = plan.attend(q, k, v, pool.layers[0], scale=SCALE, window=window)
        wanted = expected(q, pool, twigs, window=window)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-6)


def test_oracle_knows_a_plain_case() -> None:
    """Two equal keys: the mean of their values, whatever the scale."""
    pool = filled_pool(torch.float32, 4, 1, 8)
    pool.assign(0, 0, [2])
    batch = build_batch([Twig(0, 1, root(0), [3], 0)])
    q, k, v = random_qkv(1, torch.float32)
    pool.layers[0].k[2] = k[0]
    old = pool.layers[0].v[2].clone()
    out = (
        TorchAttention()
        .plan(batch, pool.table)
        .attend(q, k, v, pool.layers[0], scale=1 / math.sqrt(DIM))
    )
    wanted = ((old + v[0]) / 2).repeat_interleave(HEADS // KV_HEADS, 0)
    torch.testing.assert_close(out[0], wanted)
