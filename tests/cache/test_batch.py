"""Packing twigs into a batch: every field against a slow, obvious construction."""

import random

import torch

from spec_serve.cache.batch import WORD, TreeBatch, Twig, build_batch
from spec_serve.cache.tree import TokenTree, chain, root, trie


def bits(batch: TreeBatch, node: int) -> set[int]:
    """The twig nodes whose ancestor bits are set for query node `node`."""
    words = [int(word) & (1 << 64) - 1 for word in batch.ancestors[node]]
    whole = sum(word << WORD * i for i, word in enumerate(words))
    return {j for j in range(WORD * len(words)) if whole >> j & 1}


def compare(twigs: list[Twig]) -> TreeBatch:
    batch = build_batch(twigs)
    at = logit = 0
    assert batch.rows == len(twigs)
    for b, twig in enumerate(twigs):
        tree, n = twig.tree, len(twig.tree)
        assert int(batch.node_ptr[b]) == at == int(batch.twig_ptr[b])
        assert int(batch.row_ids[b]) == twig.row and int(batch.prefix[b]) == twig.prefix
        straight = all(parent == i - 1 for i, parent in enumerate(tree.parents))
        assert bool(batch.chain[b]) == straight
        for i in range(n):
            path = tree.path(i)
            assert int(batch.tokens[at + i]) == tree.tokens[i]
            assert int(batch.positions[at + i]) == twig.prefix + len(path) - 1
            parent = tree.parents[i]
            assert int(batch.parents[at + i]) == (-1 if parent < 0 else at + parent)
            assert int(batch.slots[at + i]) == twig.slots[i] == int(batch.twig_slots[at + i])
            assert int(batch.row_of[at + i]) == b
            assert int(batch.given[at + i]) == (i < tree.given)
            if not straight:
                assert bits(batch, at + i) == set(path)
            if i >= twig.logits_from:
                assert int(batch.logit_of[at + i]) == logit
                assert int(batch.logits_at[logit]) == at + i
                logit += 1
            else:
                assert int(batch.logit_of[at + i]) == -1
        at += n
    assert len(batch) == at == int(batch.node_ptr[len(twigs)])
    assert batch.logits_at.shape == (logit,)
    for name in TreeBatch.__dataclass_fields__:
        assert getattr(batch, name).dtype == torch.int64, name
    return batch


def test_prefill_decode_and_speculation_in_one_batch() -> None:
    bushy = trie([9], [[1, 2], [1, 3], [4]])
    batch = compare(
        [
            Twig(3, 10, chain([5, 6, 7]), [21, 22, 23], 2),
            Twig(0, 0, root(8), [30], 0),
            Twig(1, 4, bushy, [40, 41, 42, 43, 44], 0),
            Twig(2, 2, chain([1, 2]), [50, 51], 2),
            Twig(4, 7, chain([3, 4, 5], given=1), [61, 62, 63], 0),
        ]
    )
    assert batch.positions.tolist() == [10, 11, 12, 0, 4, 5, 6, 6, 5, 2, 3, 7, 8, 9]
    assert batch.logits_at.tolist() == [2, 3, 4, 5, 6, 7, 8, 11, 12, 13]
    assert batch.given.tolist() == [1, 1, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1, 0, 0]
    assert batch.ancestors[4:9, 0].tolist() == [0b1, 0b11, 0b111, 0b1011, 0b10001]
    assert batch.ancestors.shape == (14, 1)


def test_a_row_with_logits_nowhere() -> None:
    batch = compare([Twig(0, 0, chain([1, 2, 3]), [1, 2, 3], 3)])
    assert batch.logits_at.tolist() == [] and batch.logit_of.tolist() == [-1, -1, -1]


def test_the_64th_bit_is_a_sign_bit() -> None:
    tree = TokenTree(range(64), [-1, 0, 0, *range(2, 63)], 1)
    batch = compare([Twig(0, 5, tree, range(1, 65), 0)])
    assert batch.ancestors.shape == (64, 1) and int(batch.ancestors[63, 0]) < 0


def test_wide_trees_take_several_words() -> None:
    tree = TokenTree(range(130), [-1, 0, 0, *range(2, 129)], 1)
    small = trie([1], [[2], [3]])
    batch = compare([Twig(0, 5, tree, range(1, 131), 0), Twig(1, 0, small, [131, 132, 133], 1)])
    assert batch.ancestors.shape == (133, 3)
    assert batch.ancestors[132].tolist() == [0b101, 0, 0]


def test_random_batches() -> None:
    rng = random.Random(3)
    for _ in range(30):
        twigs = []
        for row in range(rng.randint(1, 5)):
            given = [rng.randrange(9) for _ in range(rng.randint(1, 4))]
            branches = [
                [rng.randrange(4) for _ in range(rng.randint(0, 5))]
                for _ in range(rng.choice([0, 1, 3, 30]))
            ]
            tree = trie(given, branches)
            tree.check()
            slots = [rng.randrange(1, 999) for _ in range(len(tree))]
            twigs.append(Twig(row, rng.randrange(50), tree, slots, rng.randint(0, len(tree))))
        compare(twigs)
