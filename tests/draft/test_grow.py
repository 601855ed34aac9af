"""Level-by-level growth equals EAGLE-2's algorithm done by hand, and stand-alone drafts pair."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Plan, Seen
from spec_serve.draft.grow import grow, rerank
from spec_serve.draft.standalone import VocabularyMismatch, common_vocabulary

VOCAB = 13


class Silent:
    """No noise, no temperature."""

    def add(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        return logits


def table(path: Sequence[int]) -> Tensor:
    """Logits after a path: any fixed function of it will do."""
    generator = torch.Generator().manual_seed(hash(tuple(path)) % (1 << 31))
    return torch.randn(VOCAB, generator=generator) * 2


def by_hand(root: int, depth: int, width: int, nodes: int) -> tuple[list[int], list[int]]:
    """EAGLE-2 growth and reranking over `table`, one node at a time."""
    tokens, parents, scores, paths = [], [], [], []

    def expand(parent: int, path: Sequence[int], score: float) -> list[int]:
        logp = table(path).log_softmax(0)
        made = []
        for token in logp.topk(width).indices.tolist():
            made.append(len(tokens))
            tokens.append(token)
            parents.append(parent)
            scores.append(score + float(logp[token]))
            paths.append([*path, token])
        return made

    frontier = expand(-1, [root], 0.0)
    for _ in range(depth - 1):
        made = [node for at in frontier for node in expand(at, paths[at], scores[at])]
        frontier = sorted(made, key=lambda i: -scores[i])[:width]
    keep = sorted(sorted(range(len(tokens)), key=lambda i: -scores[i])[:nodes])
    place = {-1: -1} | {node: i for i, node in enumerate(keep)}
    return [tokens[i] for i in keep], [place[parents[i]] for i in keep]


@pytest.mark.parametrize("shape", [(1, 3, 3), (3, 1, 3), (3, 3, 9), (4, 2, 30), (5, 4, 20)])
def test_growth_equals_the_algorithm_by_hand(shape: tuple[int, int, int]) -> None:
    depth, width, nodes = shape
    roots = [3, 8]
    lengths = [5, 11]
    twigs = [Twig(b, n - 1, chain([root]), [b + 1], 0) for b, (root, n) in
             enumerate(zip(roots, lengths, strict=True))]  # fmt: skip
    batch = build_batch(twigs)
    seen = Seen(batch, torch.tensor([0, 1]), torch.tensor(lengths), None)
    grants = torch.arange(100, 100 + 2 * max(1, (depth - 1) * width)).view(2, -1)
    paths: dict[int, list[int]] = {}  # slot -> path, as K/V would remember it

    def forward(level: TreeBatch, state: Tensor | None) -> tuple[Tensor, None]:
        out = []
        for i in range(len(level)):
            row = int(level.row_of[i])
            start, stop = level.twig_ptr[row : row + 2].tolist()
            bits = int(level.ancestors[i, 0])
            own = [int(level.twig_slots[start + j]) for j in range(stop - start) if bits >> j & 1]
            assert own[-1] == int(level.slots[i])
            above = paths[own[-2]] if len(own) > 1 else [roots[row]]
            paths[own[-1]] = [*above, int(level.tokens[i])]
            assert int(level.positions[i]) == lengths[row] + len(own) - 1
            assert int(level.prefix[row]) == lengths[row]
            out.append(table(paths[own[-1]]))
        return torch.stack(out), None

    first = torch.stack([table([root]) for root in roots])
    trees = grow(first, None, seen, grants, Plan(depth, width, nodes), Silent(), forward)
    for b, root in enumerate(roots):
        count = int(trees.count[b])
        tokens, parents = by_hand(root, depth, width, nodes)
        assert trees.tokens[b, :count].tolist() == tokens
        assert trees.parents[b, :count].tolist() == parents
        assert all(parent < i for i, parent in enumerate(parents))


def test_rerank_keeps_the_parents_of_equals() -> None:
    zero = math.log(1.0)
    trees = rerank(
        torch.tensor([[1, 2, 3]]), torch.tensor([[-1, 0, 1]]), torch.tensor([[zero] * 3]), 2
    )
    assert trees.tokens.tolist() == [[1, 2]]
    assert trees.parents.tolist() == [[-1, 0]]


class Words:
    """A vocabulary given as a list; None = padding."""

    def __init__(self, words: Sequence[str | None], special: Sequence[int] = ()) -> None:
        self.words = words
        self.special = special
        self.vocab_size = len(words)
        self.unused_ids = frozenset(i for i, word in enumerate(words) if word is None)

    def token_bytes(self, token_id: int) -> bytes:
        return (self.words[token_id] or "[PAD]").encode()

    def is_special(self, token_id: int) -> bool:
        return token_id in self.special


def test_padding_does_not_count_and_differences_are_named() -> None:
    base = ["a", "b", "c", "<e>"]
    assert common_vocabulary(Words(base, [3]), Words([*base, None, None], [3])) == 4
    assert common_vocabulary(Words([*base, "think"], [3]), Words([*base, None], [3])) == 4
    with pytest.raises(VocabularyMismatch, match=r"1: b'b' / b'x'"):
        common_vocabulary(Words(base), Words(["a", "x", "c", "<e>"]))
    with pytest.raises(VocabularyMismatch):
        common_vocabulary(Words(base, [3]), Words(base))
