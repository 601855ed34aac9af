"""Problems for attention kernels, and what they should answer.

Ragged batches of chains, trees, roots and growing twigs over a pool in which everything that must
not be read is NaN; the answer is the torch reference's on a CPU, over the pool's values in float32.
Used by the tests under Triton's interpreter, by those on a GPU, and by `bench gpu`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec_serve.cache.batch import WORD, TreeBatch, Twig, build_batch
from spec_serve.cache.pool import LayerKV
from spec_serve.cache.tree import TokenTree, chain, root
from spec_serve.kernels.base import AttentionBackend
from spec_serve.kernels.reference import TorchAttention

# Largest error against the largest value, by the dtype that is rounded to.
TOLERANCE = {torch.float32: 3e-6, torch.float16: 3e-3, torch.bfloat16: 3e-2}


@dataclass(frozen=True, slots=True)
class Case:
    """rows: (cached tokens, tree) each. grown: newest nodes of each row that are queries, the
    others' K/V lie in the pool already. mutual: all nodes of a twig see each other."""

    name: str
    rows: tuple[tuple[int, TokenTree], ...]
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    dtype: torch.dtype = torch.float32
    kv_dtype: torch.dtype | None = None
    window: int | None = None
    softcap: float | None = None
    first: int = 0
    grown: tuple[int, ...] = ()
    mutual: bool = False


def bushy(nodes: int, seed: int, given: int = 1) -> TokenTree:
    """A random tree below a chain of given nodes."""
    generator = torch.Generator().manual_seed(seed)
    parents = list(range(-1, given - 1))
    for i in range(given, nodes):
        low = max(given - 1, i - 6)
        parents.append(int(torch.randint(low, i, (), generator=generator, device="cpu")))
    return TokenTree(list(range(nodes)), parents, given)


def small_cases() -> list[Case]:
    """Every kind of mask, head size and dtype, each small enough for an interpreter."""
    mixed = ((0, chain(range(21))), (23, bushy(31, 1)), (70, root(7)), (1, bushy(9, 2, 3)),
             (0, root(3)))  # fmt: skip
    ragged = ((3, chain(range(512))), (40, bushy(31, 1)), (9, root(1)))
    deep = ((5, bushy(70, 3)), (33, root(1)))
    short = ((11, bushy(7, 4)), (19, root(2)))
    return [
        Case("mixed", mixed),
        Case("mixed, window 1", mixed, window=1, softcap=2.0),
        Case("mixed, window 4", mixed, window=4, dtype=torch.bfloat16),
        Case("mixed, window 40, first 1", mixed[:4], window=40, first=1, dtype=torch.float16),
        Case("a long chunk beside a tree", ragged, heads=2, kv_heads=1),
        Case("two words", deep, softcap=1.5),
        Case("two words, window 3", deep, window=3),
        Case("grown", ((23, bushy(31, 1)), (9, bushy(70, 2))), grown=(4, 9)),
        Case("grown, window 3", ((23, bushy(31, 1)), (9, bushy(70, 2))), grown=(4, 9), window=3),
        Case("mutual", ((14, bushy(6, 1)), (3, bushy(6, 1))), mutual=True, window=7),
        Case("chunk behind a prefix, window", ((40, chain(range(30))),), window=9),
        Case("one head", short, heads=1, kv_heads=1, head_dim=80),
        Case("three to a group", short, heads=6, kv_heads=2, head_dim=96, dtype=torch.float16),
        Case("many to a group", short, heads=20, kv_heads=1, head_dim=128, dtype=torch.bfloat16),
        Case("192", short, head_dim=192, dtype=torch.float16),
        Case("256", short, head_dim=256, dtype=torch.bfloat16),
        Case("fp8 K/V", short, dtype=torch.bfloat16, kv_dtype=torch.float8_e4m3fn),
    ]


def large_cases() -> list[Case]:
    """What a device can do in a moment: a long chain beside trees and roots, long prefixes."""
    ragged = ((100, chain(range(512))), (3000, bushy(31, 1)), (5000, root(1)), (0, root(2)))
    lone = ((8000, root(1)),)
    return [
        replace(case, name=f"{name} {dtype}", dtype=dtype)
        for dtype in (torch.float32, torch.float16, torch.bfloat16)
        for name, case in {
            "ragged": Case("", ragged, 32, 8, 128),
            "ragged, window": Case("", ragged, 12, 2, 128, window=700),
            "lone": Case("", lone, 32, 8, 128),
            "64 rows": Case("", ((600, bushy(16, 5)),) * 64, 16, 8, 128),
        }.items()
    ]


@dataclass(frozen=True, slots=True)
class Problem:
    """A case's tensors on one device; `kv` as it is before the batch's K and V are written."""

    case: Case
    batch: TreeBatch
    table: Tensor
    kv: LayerKV
    q: Tensor
    k: Tensor
    v: Tensor

    def run(self, backend: AttentionBackend) -> Tensor:
        """[N, heads, D] of the backend; `kv` then holds the batch's K and V."""
        plan = backend.plan(self.batch, self.table, self.case.first)
        scale = self.case.head_dim**-0.5
        window, softcap = self.case.window, self.case.softcap
        return plan.attend(
            self.q, self.k, self.v, self.kv, scale=scale, window=window, softcap=softcap
        )


def make(case: Case, device: torch.device | str = "cpu", seed: int = 0) -> Problem:
    """Random tensors for a case, the same ones on every device."""
    generator = torch.Generator().manual_seed(seed)
    total = sum(prefix + len(tree) for prefix, tree in case.rows)
    places = (torch.randperm(2 * total, generator=generator)[:total] + 1).tolist()
    positions = max(prefix + len(tree) for prefix, tree in case.rows)
    table = torch.zeros(len(case.rows), positions + 1, dtype=torch.int64)
    twigs, cached = [], []
    for row, (prefix, tree) in enumerate(case.rows):
        taken, places = places[: prefix + len(tree)], places[prefix + len(tree) :]
        table[row, :prefix] = torch.tensor(taken[:prefix], dtype=torch.int64)
        table[row, : case.first] = 0
        cached += taken[case.first : prefix]
        twigs.append(Twig(row, prefix, tree, taken[prefix:], 0))
    batch = build_batch(twigs)
    if case.mutual:
        sizes = batch.node_ptr.diff()[batch.row_of]
        assert int(sizes.max()) < WORD - 1
        batch.ancestors.copy_((torch.ones_like(sizes) << sizes).sub(1).unsqueeze(1))
        batch.chain.zero_()
    if case.grown:
        old = torch.ones(len(batch), dtype=torch.bool)
        for end, count in zip(batch.node_ptr[1:].tolist(), case.grown, strict=True):
            old[end - count : end] = False
        cached += batch.slots[old].tolist()
        batch = growing(batch, case.grown)
    shape = (2 * total + 1, case.kv_heads, case.head_dim)
    wide = [torch.full(shape, float("nan")) for _ in range(2)]
    for part in wide:
        part[cached] = torch.randn(len(cached), *shape[1:], generator=generator)
    heads = case.heads + 2 * case.kv_heads
    qkv = torch.randn(len(batch), heads, case.head_dim, generator=generator).to(case.dtype)
    parts = qkv.to(device).split_with_sizes([case.heads, case.kv_heads, case.kv_heads], 1)
    kv = LayerKV(*(part.to(case.kv_dtype or case.dtype).to(device) for part in wide))
    return Problem(case, moved(batch, device), table.to(device), kv, *parts)


def growing(whole: TreeBatch, counts: Sequence[int]) -> TreeBatch:
    """Only the last counts[b] nodes of each row's twig as queries."""
    ends = whole.node_ptr.tolist()
    keep = [i for b, n in enumerate(counts) for i in range(ends[b + 1] - n, ends[b + 1])]
    names = ("tokens", "positions", "slots", "row_of", "ancestors", "given")
    index = torch.tensor(keep)
    number = torch.arange(len(keep))
    return replace(
        whole,
        **{name: getattr(whole, name)[index] for name in names},
        parents=torch.full((len(keep),), -1),
        logit_of=number,
        logits_at=number,
        node_ptr=torch.tensor([0, *torch.tensor(counts).cumsum(0).tolist()]),
        chain=torch.zeros_like(whole.chain),
    )


def moved(batch: TreeBatch, device: torch.device | str) -> TreeBatch:
    """The batch on another device."""
    return TreeBatch(*(getattr(batch, name).to(device) for name in TreeBatch.__slots__))


def wanted(problem: Problem) -> Tensor:
    """The reference's answer on the CPU, float32, to a problem that was run: it reads K and V as
    the pool holds them."""
    slots = problem.batch.slots
    kv = LayerKV(problem.kv.k.to("cpu", torch.float32), problem.kv.v.to("cpu", torch.float32))
    plain = replace(
        problem,
        batch=moved(problem.batch, "cpu"),
        table=problem.table.cpu(),
        kv=kv,
        q=problem.q.cpu().float(),
        k=problem.kv.k[slots].cpu().float(),
        v=problem.kv.v[slots].cpu().float(),
    )
    return plain.run(TorchAttention(exact=True))


def error(case: Case, backend: AttentionBackend, device: torch.device | str = "cpu") -> float:
    """Largest difference from the reference, in units of what the dtype allows; NaN counts as
    infinite, and so does K or V that did not arrive."""
    problem = make(case, device)
    out = problem.run(backend).float().cpu()
    exact = problem.kv.k.dtype == case.dtype
    for pool, part in ((problem.kv.k, problem.k), (problem.kv.v, problem.v)):
        arrived = pool[problem.batch.slots].float()
        # Rounded to fp8, some values are off in the interpreter, which loses the carry.
        close = arrived.isclose(part.float(), rtol=2**-3, atol=2**-9).float().mean()
        if not (torch.equal(arrived, part.float()) if exact else float(close) > 0.95):
            return float("inf")
    expected = wanted(problem)
    worst = float((out - expected).abs().max() / expected.abs().max()) / TOLERANCE[case.dtype]
    return worst if worst == worst else float("inf")
