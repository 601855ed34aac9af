"""Ordered attention: the same bits whatever a token is computed with, and the right values."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool, KVSpec
from spec_serve.cache.tree import TokenTree, chain, root
from spec_serve.kernels import ordered
from spec_serve.kernels.ordered import OFFSET, in_order, padded_rows, tree_parts
from spec_serve.kernels.reference import TorchAttention

SHAPES = [(9, 3, 64), (6, 2, 16), (4, 4, 32), (8, 2, 24), (4, 1, 32)]
ROWS, POSITIONS = 4, 1000


def needs_order(kv_heads: int, dim: int) -> None:
    if not in_order(max(kv_heads, 2), dim, torch.get_num_threads()):
        pytest.skip("this machine's BLAS sums in another order; attention is float64 then")


class Row:
    """One row of 900 given tokens and then a tree: q, k and v by node, any way of running them."""

    def __init__(self, shape: tuple[int, int, int], tree: TokenTree, prefix: int) -> None:
        heads, kv_heads, dim = shape
        count = prefix + len(tree)
        self.q = torch.randn(count, heads, dim) * 2
        self.k, self.v = torch.randn(2, count, kv_heads, dim)
        self.tree, self.prefix = tree, prefix
        self.spec = KVSpec(kv_heads, dim, torch.float32)
        self.scale = dim**-0.5

    def path(self, node: int) -> list[int]:
        """Indices into q, k, v of what leads to a node of the tree, itself included."""
        return [*range(self.prefix), *(self.prefix + a for a in self.tree.path(node))]

    def run(
        self,
        cached: Sequence[int],
        tree: TokenTree,
        nodes: Sequence[int],
        slots: Sequence[int],
        window: int | None = None,
        company: int = 0,
    ) -> Tensor:
        """Attention of `nodes` as `tree` behind `cached`, at `slots`, beside rows of one node."""
        pool = KVPool([self.spec], 2 * POSITIONS, ROWS + company, POSITIONS)
        pool.layers[0].k.fill_(float("nan"))
        pool.layers[0].v.fill_(float("nan"))
        own = torch.tensor(slots[: len(cached)], dtype=torch.int64)
        pool.layers[0].k[own], pool.layers[0].v[own] = self.k[cached], self.v[cached]
        pool.assign(1, 0, slots[: len(cached)])
        twigs = [Twig(1, len(cached), tree, slots[len(cached) :], 0)]
        index = list(nodes)
        for i in range(company):
            twigs.append(Twig(ROWS + i, 0, root(0), [2 * POSITIONS - i], 0))
            index.append(0)
        batch = build_batch(twigs)
        plan = TorchAttention(exact=True).plan(batch, pool.table)
        out = plan.attend(
            self.q[index],
            self.k[index],
            self.v[index],
            pool.layers[0],
            scale=self.scale,
            window=window,
        )
        return out[: len(nodes)]


def fan(nodes: int, seed: int) -> TokenTree:
    """A random tree, broad and deep by turns."""
    rng = random.Random(seed)
    parents = [-1]
    parents += [rng.randrange(max(0, i - rng.choice((1, 2, 9))), i) for i in range(1, nodes)]
    return TokenTree(list(range(nodes)), parents, 1)


def scattered(count: int, seed: int) -> list[int]:
    """Slots that are consecutive for a while and then are not."""
    rng = random.Random(seed)
    head = rng.randrange(count)
    rest = list(range(head + 11, head + 11 + 2 * (count - head)))
    return [*range(1, 1 + head), *rng.sample(rest, count - head)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [None, 150])
@pytest.mark.parametrize(("prefix", "nodes"), [(120, 24), (250, 13), (0, 40), (383, 2), (640, 70)])
def test_tree_chain_chunk_and_single_tokens_agree(
    shape: tuple[int, int, int], window: int | None, prefix: int, nodes: int
) -> None:
    needs_order(*shape[1:])
    row = Row(shape, fan(nodes, prefix), prefix)
    count = prefix + nodes
    whole = row.run(
        range(prefix), row.tree, range(prefix, count), range(1, 1 + count), window, company=3
    )
    again = row.run(
        range(prefix), row.tree, range(prefix, count), scattered(count, nodes), window, company=1
    )
    assert torch.equal(whole, again)
    rng = random.Random(nodes)
    for node in {0, nodes - 1, *rng.sample(range(nodes), min(nodes, 5))}:
        path = row.path(node)
        length = len(path)
        for step in {1, len(path) - prefix, rng.randrange(1, length + 1), length}:
            tree = root(0) if step == 1 else chain(range(step))
            out = row.run(
                path[: length - step], tree, path[length - step :],
                scattered(length, step), window, company=rng.randrange(3),
            )  # fmt: skip
            assert torch.equal(out[-1], whole[node])


@pytest.mark.parametrize("window", [None, 150])
def test_values_are_right_over_many_blocks(window: int | None) -> None:
    row = Row(SHAPES[0], fan(70, 3), 600)
    out = row.run(range(600), row.tree, range(600, 670), scattered(670, 5), window)
    for node in range(70):
        keys = row.path(node)[-window if window else None :]
        k, v = (x[keys].double().repeat_interleave(3, 1) for x in (row.k, row.v))
        scores = torch.einsum("hd,lhd->hl", row.q[600 + node].double(), k) * row.scale
        wanted = torch.einsum("hl,lhd->hd", scores.softmax(-1), v)
        torch.testing.assert_close(out[node].double(), wanted, rtol=0, atol=6e-6)


def test_long_chunk_is_cut_and_agrees_with_short_ones() -> None:
    shape = SHAPES[0]
    needs_order(*shape[1:])
    row = Row(shape, chain(range(400)), 0)
    whole = row.run([], row.tree, range(400), range(1, 401))
    cut = row.run(range(331), chain(range(69)), range(331, 400), scattered(400, 2))
    assert torch.equal(whole[331:], cut)


def test_crowded_block_is_split_into_parts() -> None:
    """300 siblings stand at one position: no product may sum over all their keys."""
    tree = TokenTree(list(range(301)), [-1, *[0] * 300], 1)
    seen = torch.zeros(301, 401, dtype=torch.bool)
    for node in range(301):
        seen[node, [*range(100), *(100 + a for a in tree.path(node))]] = True
    positions = torch.tensor([*range(101), *[101] * 300])
    parts = list(tree_parts(7, torch.arange(401), positions, seen))
    assert [p.start for p in parts][0] == 7 and sum(p.count for p in parts) == 301
    for part in parts:
        assert part.count <= ordered.SLICE
        sizes = [b - a for a, b in zip(part.bounds, part.bounds[1:], strict=False)]
        assert max(sizes) <= ordered.LONGEST and sum(sizes) == len(part.slots)
        for i in range(part.count):
            mine = part.slots if part.seen is None else part.slots[part.seen[i]]
            node = part.start - 7 + i
            assert mine.tolist() == [*range(100), *(100 + a for a in tree.path(node))]


def test_powers_do_not_depend_on_place_or_threads() -> None:
    x = -torch.rand(3 * 11 * 4 * 1504 // ordered.LANES * ordered.LANES) * 40
    x[::5] = float("-inf")
    wanted = torch.cat([piece.clone().exp2_() for piece in x.split(ordered.LANES)])
    assert (wanted[::5] == 0).all() and (wanted <= 1).all()
    torch.testing.assert_close(wanted.double(), x.double().exp2(), rtol=3e-7, atol=0)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 5):
            torch.set_num_threads(threads)
            got = x.clone()
            ordered._exp2(got)
            assert torch.equal(got, wanted)
    finally:
        torch.set_num_threads(before)


def test_total_does_not_depend_on_the_order() -> None:
    weights = torch.rand(5, 3000).pow(9)
    weights[:, ::4] = 0
    total = ordered._total(weights, OFFSET * 3000)
    for _ in range(5):
        order = torch.randperm(3000)
        assert torch.equal(ordered._total(weights[:, order], OFFSET * 3000), total)
    wanted = weights.double().sum(-1, keepdim=True)
    torch.testing.assert_close(total.double(), wanted, rtol=1e-7, atol=0)


def test_rows_of_different_lengths_share_a_group_and_stay_themselves() -> None:
    heads, kv_heads, dim = SHAPES[0]
    needs_order(kv_heads, dim)
    pool = KVPool([KVSpec(kv_heads, dim, torch.float32)], 3000, 12, POSITIONS)
    pool.layers[0].k.normal_()
    pool.layers[0].v.normal_()
    twigs, free = [], 1
    for row in range(12):
        prefix = (0, 1, 15, 127, 128, 129, 200, 300, 511, 512, 64, 17)[row]
        pool.assign(row, 0, range(free, free + prefix))
        tree = chain(range(5)) if row in (4, 7) else root(0)
        slots = list(range(free + prefix, free + prefix + len(tree)))
        free += prefix + len(tree)
        twigs.append(Twig(row, prefix, tree, slots, 0))
    batch = build_batch(twigs)
    q = torch.randn(len(batch), heads, dim)
    k, v = torch.randn(2, len(batch), kv_heads, dim)
    backend = TorchAttention(exact=True)
    together = backend.plan(batch, pool.table).attend(q, k, v, pool.layers[0], scale=0.2)
    at = 0
    for twig in twigs:
        own = slice(at, at + len(twig.tree))
        at = own.stop
        plan = backend.plan(build_batch([twig]), pool.table)
        alone = plan.attend(q[own], k[own], v[own], pool.layers[0], scale=0.2)
        assert torch.equal(alone, together[own])


def test_padded_rows() -> None:
    assert [padded_rows(n, 64) for n in (1, 3, 4, 5, 9, 12)] == [4, 4, 4, 8, 12, 12]
    assert [padded_rows(n, 16) for n in (1, 16, 17)] == [16, 16, 20]
