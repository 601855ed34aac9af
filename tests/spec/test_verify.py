"""The walk against a reference, and what choose and walk promise together: losslessness."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.tree import TokenTree, chain, root, trie
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowNoise, RowSampling, choose, pack
from spec_serve.spec.verify import Verdict, walk
from tests.late import Late

stats = Late("scipy.stats")


def batch_of(trees: Sequence[TokenTree], logits_from: Sequence[int]) -> TreeBatch:
    """Each row at position 10, on slots that don't matter here."""
    return build_batch(
        [
            Twig(b, 10, tree, range(1, 1 + len(tree)), first)
            for b, (tree, first) in enumerate(zip(trees, logits_from, strict=True))
        ]
    )


def depth_of(trees: Sequence[TokenTree]) -> int:
    return max(max(tree.depths()) - tree.given + 1 for tree in trees)


def slow_walk(tree: TokenTree, first: int, chosen: Sequence[int]) -> tuple[list[int], int]:
    """Accepted guesses and bonus of one row; chosen: tokens drawn at its nodes from `first` on."""
    at, path = tree.given - 1, []
    while at >= first:
        children = [
            i
            for i in range(tree.given, len(tree))
            if tree.parents[i] == at and tree.tokens[i] == chosen[at - first]
        ]
        if not children:
            break
        at = children[0]
        path.append(at)
    return path, chosen[at - first] if at >= first else -1


@st.composite
def twigs(draw: st.DrawFn) -> tuple[TokenTree, int]:
    known = draw(st.lists(st.integers(0, 3), min_size=1, max_size=4))
    branches = draw(st.lists(st.lists(st.integers(0, 3), max_size=5), max_size=6))
    tree = trie(known, branches)
    first = draw(st.sampled_from([0, tree.given - 1, len(tree)]))
    return tree, first


@settings(max_examples=300, deadline=None)
@given(st.lists(twigs(), min_size=1, max_size=5), st.integers(0, 2), st.randoms())
def test_walk_equals_the_reference(
    rows: list[tuple[TokenTree, int]], slack: int, rng: random.Random
) -> None:
    trees, firsts = [tree for tree, _ in rows], [first for _, first in rows]
    batch = batch_of(trees, firsts)
    chosen = [rng.randrange(4) for _ in range(len(batch.logits_at))]
    depth = depth_of(trees) + slack
    verdict = walk(batch, torch.tensor(chosen, dtype=torch.int64), depth)
    assert verdict.path.shape == (len(rows), depth)
    start = used = 0
    for b, (tree, first) in enumerate(rows):
        count = len(tree) - first
        path, bonus = slow_walk(tree, first, chosen[used : used + count])
        assert verdict.path[b].tolist() == [start + i for i in path] + [-1] * (depth - len(path))
        assert verdict.accepted[b] == len(path)
        assert verdict.leaf[b] == start + (path[-1] if path else tree.given - 1)
        assert verdict.bonus[b] == bonus
        start, used = start + len(tree), used + count


def test_rows_without_guesses_take_the_short_cut() -> None:
    batch = batch_of([root(5), root(6)], [0, 0])
    verdict = walk(batch, torch.tensor([8, 9]), 0)
    assert verdict.bonus.tolist() == [8, 9] and verdict.leaf.tolist() == [0, 1]
    assert verdict.path.shape == (2, 0) and verdict.accepted.tolist() == [0, 0]
    mixed = batch_of([chain([1, 2, 3]), root(4), chain([5, 6])], [3, 0, 0])
    verdict = walk(mixed, torch.tensor([7, 8, 9]), 0)
    assert verdict.leaf.tolist() == [2, 3, 5] and verdict.bonus.tolist() == [-1, 7, 9]
    silent = batch_of([chain([1, 2])], [2])
    assert walk(silent, torch.empty(0, dtype=torch.int64), 0).bonus.tolist() == [-1]


# A toy target: the next token depends on the last two, by a fixed table of logits.
Context = tuple[int, ...]


class Toy:
    """Conditional logits over a small vocabulary, a pure function of the last two tokens."""

    def __init__(self, vocab: int, seed: int, scale: float = 1.5) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        self.table = torch.randn(vocab, vocab, vocab, generator=generator) * scale

    def logits(self, context: Sequence[int]) -> torch.Tensor:
        return self.table[context[-2], context[-1]]

    def tree_logits(self, before: Sequence[int], tree: TokenTree) -> torch.Tensor:
        """[nodes, V] with `before` standing in front of node 0."""
        rows = [
            self.logits([*before, *(tree.tokens[i] for i in tree.path(node))])
            for node in range(len(tree))
        ]
        return torch.stack(rows)


Draft = Callable[[RowSampling, Sequence[int]], list[list[int]]]


def generate(
    toy: Toy, state: RowSampling, prompt: Sequence[int], count: int, draft: Draft
) -> tuple[list[int], int]:
    """Decode `count` tokens with the guesses of `draft`; also how many of them were accepted."""
    context, accepted = list(prompt), 0
    while len(context) < len(prompt) + count:
        tree = trie(context[-1:], draft(state, context))
        batch = build_batch([Twig(0, len(context) - 1, tree, range(1, 1 + len(tree)), 0)])
        nodes = pack([(state, tree, len(context) - 1, 0)], "cpu")
        chosen = choose(toy.tree_logits(context[:-1], tree), nodes)
        verdict = walk(batch, chosen, depth_of([tree]))
        run = [tree.tokens[i] for i in verdict.path[0].tolist() if i >= 0]
        accepted += len(run)
        run.append(int(verdict.bonus[0]))
        run = run[: len(prompt) + count - len(context)]
        state.extend(run)
        context += run
    return context[len(prompt) :], accepted


def nothing(state: RowSampling, context: Sequence[int]) -> list[list[int]]:
    return []


def by_rank(toy: Toy, width: int, depth: int) -> Draft:
    """Every combination of the `width` best tokens per level."""

    def draft(state: RowSampling, context: Sequence[int]) -> list[list[int]]:
        branches: list[list[int]] = [[]]
        for _ in range(depth):
            branches = [
                [*branch, token]
                for branch in branches
                for token in toy.logits([*context, *branch]).topk(width).indices.tolist()
            ]
        return branches

    return draft


def coupled(toy: Toy, width: int, depth: int) -> Draft:
    """The same with the row's noise added to the drafter's logits."""

    def draft(state: RowSampling, context: Sequence[int]) -> list[list[int]]:
        noise = RowNoise([state], "cpu")
        branches: list[list[int]] = [[]]
        for level in range(depth):
            grown = []
            for branch in branches:
                logits = toy.logits([*context, *branch])[None]
                at = torch.tensor([len(context) + level])
                noisy = noise.add(logits, torch.tensor([0]), at)[0]
                grown += [[*branch, token] for token in noisy.topk(width).indices.tolist()]
            branches = grown
        return branches

    return draft


def drafts(toy: Toy) -> dict[str, Draft]:
    near, far = Toy(toy.vocab, 1), Toy(toy.vocab, 77)
    near.table = toy.table + 0.4 * near.table
    return {
        "self chain": by_rank(toy, 1, 4),
        "near tree": by_rank(near, 2, 3),
        "far tree": by_rank(far, 3, 2),
        "near coupled chain": coupled(near, 1, 4),
        "near coupled tree": coupled(near, 2, 3),
        "self coupled chain": coupled(toy, 1, 5),
    }


SETTINGS = [
    Sampling(),
    Sampling(temperature=1.0),
    Sampling(temperature=0.7, top_p=0.8),
    Sampling(temperature=1.3, top_k=3, min_p=0.05),
    Sampling(frequency_penalty=1.5),
    Sampling(frequency_penalty=-1.5, presence_penalty=1.0),
    Sampling(temperature=0.9, repetition_penalty=1.3, logit_bias={2: 3.0}),
    Sampling(temperature=0.9, bad_words=((1, 2), (3, 0, 1), (4,))),
]


@pytest.mark.parametrize("sampling", SETTINGS)
def test_tokens_equal_one_by_one_sampling_for_every_tree(sampling: Sampling) -> None:
    toy = Toy(6, 5)
    for seed in (0, 4711):

        def state(seed: int = seed) -> RowSampling:
            return RowSampling(sampling, seed, 6, [0, 1], 12, frozenset({5}))

        plain, none = generate(toy, state(), [0, 1], 40, nothing)
        assert none == 0 and 5 not in plain[:12]
        for name, draft in drafts(toy).items():
            tokens, accepted = generate(toy, state(), [0, 1], 40, draft)
            assert tokens == plain, name
            assert accepted > 0, f"{name}: a test without accepted guesses shows nothing"


def test_a_coupled_copy_of_the_target_is_always_right() -> None:
    toy = Toy(6, 5)
    state = RowSampling(Sampling(temperature=1.0), 3, 6, [0, 1], 0, frozenset())
    _, accepted = generate(toy, state, [0, 1], 48, coupled(toy, 1, 5))
    assert accepted == 40  # eight steps of five guesses and a bonus


# Many rows at once: what the first emitted tokens are distributed like.


def many(
    logits: Callable[[Sequence[int]], torch.Tensor],
    sampling: Sampling,
    trees: Sequence[TokenTree],
    seeds: Sequence[int],
    vocab: int,
) -> tuple[Verdict, TreeBatch, torch.Tensor]:
    """One step of many rows with one given node at position 1; logits by the guesses above."""
    known: dict[Context, torch.Tensor] = {}
    stacked, packed = [], []
    for tree, seed in zip(trees, seeds, strict=True):
        state = RowSampling(sampling, seed, vocab, [0], 0, frozenset())
        packed.append((state, tree, 1, 0))
        for node in range(len(tree)):
            path = tuple(tree.tokens[i] for i in tree.path(node)[1:])
            if path not in known:
                known[path] = logits(path)
            stacked.append(known[path])
    batch = batch_of(trees, [0] * len(trees))
    chosen = choose(torch.stack(stacked), pack(packed, "cpu"))
    return walk(batch, chosen, depth_of(trees)), batch, chosen


def first_tokens(verdict: Verdict, batch: TreeBatch) -> torch.Tensor:
    """The token each row emits first: its first accepted guess, else the bonus."""
    path = verdict.path[:, 0]
    return torch.where(path >= 0, batch.tokens[path.clamp(min=0)], verdict.bonus)


@pytest.mark.parametrize(
    ("p", "children"),
    [
        ((0.6, 0.4, 0.0), (0,)),
        ((0.6, 0.4, 0.0), (0, 1)),
        ((0.2, 0.3, 0.5), (0, 1)),
        ((0.2, 0.3, 0.5), None),
    ],
)
def test_ranked_children_keep_the_distribution(
    p: tuple[float, ...], children: tuple[int, ...] | None
) -> None:
    """None: two children drawn from q with replacement; a repeated one is merged by the trie."""
    trials = 50_000
    q = torch.tensor([0.7, 0.2, 0.1])
    if children is None:
        generator = torch.Generator().manual_seed(4)
        pairs = torch.multinomial(q.expand(trials, 3), 2, True, generator=generator).tolist()
        trees = [trie([0], [[token] for token in pair]) for pair in pairs]
    else:
        trees = [trie([0], [[token] for token in children])] * trials
    target = torch.tensor(p).log()
    warm = Sampling(temperature=1.0)
    verdict, batch, _ = many(lambda path: target, warm, trees, range(trials), 3)
    counts = np.bincount(first_tokens(verdict, batch).numpy(), minlength=3)
    possible = np.array(p) > 0
    assert (counts[~possible] == 0).all()
    assert np.abs(counts / trials - np.array(p)).max() < 0.01
    expected = np.array(p)[possible] * trials
    assert stats.chisquare(counts[possible], expected).pvalue > 0.001
    assert (verdict.accepted <= 1).all() and verdict.accepted.sum() > 0


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(temperature=0.8),
        Sampling(temperature=0.8, top_p=0.7),
        Sampling(temperature=0.8, top_k=2),
        Sampling(temperature=1.0, presence_penalty=1.0, repetition_penalty=1.5),
    ],
    ids=["plain", "top_p", "top_k", "penalties"],
)
@pytest.mark.parametrize("shape", ["chain", "tree", "coupled"])
def test_joint_distribution_of_three_tokens(sampling: Sampling, shape: str) -> None:
    """64 outcomes of three tokens against the product of exact conditionals."""
    toy, vocab, trials = Toy(4, 21, 0.8), 4, 6000
    near = Toy(4, 9, 0.8)
    near.table = toy.table + 0.6 * near.table

    def logits(path: Sequence[int]) -> torch.Tensor:
        return toy.logits([0, 0, *path])

    if shape == "coupled":
        states = [RowSampling(sampling, b, vocab, [0], 0, frozenset()) for b in range(trials)]
        trees = [trie([0], branches) for branches in coupled_pairs(near, states)]
    else:
        draft = by_rank(near, 1 if shape == "chain" else 2, 2)
        trees = [
            trie([0], draft(RowSampling(sampling, 0, 4, [0], 0, frozenset()), [0, 0]))
        ] * trials
    # Every row decodes until three tokens are there; later steps are plain (new trees of one node).
    verdict, batch, _ = many(logits, sampling, trees, range(trials), vocab)
    outcomes: list[list[int]] = []
    for b in range(trials):
        run = [int(batch.tokens[i]) for i in verdict.path[b].tolist() if i >= 0]
        outcomes.append([*run, int(verdict.bonus[b])])
    for length in (1, 2):
        rows = [b for b in range(trials) if len(outcomes[b]) == length]
        step, where = [], []
        for b in rows:
            state = RowSampling(sampling, b, vocab, [0], 0, frozenset())
            state.extend(outcomes[b])
            where.append((state, root(outcomes[b][-1]), 1 + length, 0))
            step.append(logits(outcomes[b]))
        if not rows:
            continue
        drawn = choose(torch.stack(step), pack(where, "cpu")).tolist()
        for b, token in zip(rows, drawn, strict=True):
            outcomes[b].append(token)
    counts = dict.fromkeys(itertools.product(range(4), repeat=3), 0)
    for outcome in outcomes:
        first, second, third = outcome[:3]
        counts[first, second, third] += 1
    exact = {
        cell: np.prod(
            [conditional(logits(cell[:i]), sampling, cell[:i])[cell[i]] for i in range(3)]
        )
        for cell in counts
    }
    assert sum(exact.values()) == pytest.approx(1)
    assert all(counts[cell] == 0 for cell in counts if exact[cell] == 0)
    large = [cell for cell in counts if exact[cell] * trials >= 5]
    got = [counts[cell] for cell in large]
    want = [float(exact[cell]) * trials for cell in large]
    got.append(trials - sum(got))
    want.append(trials - sum(want))
    if want[-1] < 5:
        got[-2:], want[-2:] = [sum(got[-2:])], [sum(want[-2:])]
    assert stats.chisquare(got, want).pvalue > 0.001
    assert verdict.accepted.float().mean() > 0.3


def coupled_pairs(toy: Toy, states: Sequence[RowSampling]) -> list[list[list[int]]]:
    """For all rows at once: the two best noisy tokens, each with its two best successors."""
    rows = torch.arange(len(states))
    noise = RowNoise(states, "cpu")
    start = toy.logits([0, 0]).expand(len(rows), -1)
    first = noise.add(start, rows, torch.full_like(rows, 2)).topk(2).indices  # [B, 2]
    below = toy.table[0, first].flatten(0, 1)  # [2B, V]
    rows = rows.repeat_interleave(2)
    second = noise.add(below, rows, torch.full_like(rows, 3)).topk(2).indices.view(-1, 2, 2)
    return [
        [[a, b] for a, pair in zip(*row, strict=True) for b in pair]
        for row in zip(first.tolist(), second.tolist(), strict=True)
    ]


def conditional(
    logits: torch.Tensor, s: Sampling, output: Sequence[int]
) -> npt.NDArray[np.float64]:
    """Exact next-token probabilities; the prompt is token 0."""
    x: npt.NDArray[np.float64] = logits.double().numpy().copy()
    for v in range(len(x)):
        if v == 0 or v in output:
            x[v] = x[v] / s.repetition_penalty if x[v] > 0 else x[v] * s.repetition_penalty
        x[v] -= s.presence_penalty * (v in output)
    p = np.exp(x / s.temperature)
    order = np.argsort(-p)
    if s.top_k:
        p[order[s.top_k :]] = 0
    p /= p.sum()
    before = 0.0
    for v in order:
        p[v], before = (p[v] if before < s.top_p else 0.0), before + p[v]
    total: float = p.sum()
    return p / total


def test_coupled_guesses_are_right_more_often() -> None:
    vocab, trials = 200, 3000
    generator = torch.Generator().manual_seed(2)
    target = torch.randn(vocab, generator=generator) * 2
    draft = target + torch.randn(vocab, generator=generator) * 0.5
    states = [
        RowSampling(Sampling(temperature=1.0), seed, vocab, [0], 0, frozenset())
        for seed in range(trials)
    ]
    drawn = choose(
        target.expand(trials, vocab), pack([(state, root(0), 6, 0) for state in states], "cpu")
    )
    noisy = RowNoise(states, "cpu").add(
        draft.expand(trials, vocab), torch.arange(trials), torch.full((trials,), 7)
    )
    together = (noisy.argmax(-1) == drawn).double().mean().item()
    ranked = (draft.argmax() == drawn).double().mean().item()
    overlap = torch.minimum(target.softmax(0), draft.softmax(0)).sum().item()
    # Known bound of this coupling: (1 - TV) / (1 + TV), where 1 - TV is the overlap.
    assert together > overlap / (2 - overlap) - 0.03
    assert together > ranked + 0.3
