"""Token trees: the shapes built here and what is read off them."""

import pytest

from spec_serve.cache.tree import TokenTree, chain, root, trie


def test_a_chain_is_given_whole_unless_said_otherwise() -> None:
    tree = chain([4, 5, 6])
    assert len(tree) == tree.given == 3 and tree.is_chain
    assert list(tree.parents) == [-1, 0, 1]
    assert tree.depths() == [0, 1, 2]
    assert tree.ancestors() == [0b1, 0b11, 0b111]
    assert tree.path(2) == [0, 1, 2]
    guessed = chain([4, 5, 6], given=1)
    assert guessed.given == 1 and guessed.is_chain
    tree.check()
    guessed.check()


def test_a_root_is_one_given_node() -> None:
    tree = root(7)
    assert len(tree) == tree.given == 1 and tree.is_chain
    assert tree.ancestors() == [1] and tree.path(0) == [0]
    tree.check()


def test_a_trie_merges_common_prefixes_below_the_given_chain() -> None:
    tree = trie([1, 2], [[5, 6], [5, 7], [8], [5, 6, 9], []])
    tree.check()
    assert list(tree.tokens) == [1, 2, 5, 6, 7, 8, 9]
    assert list(tree.parents) == [-1, 0, 1, 2, 2, 1, 3]
    assert tree.given == 2 and not tree.is_chain
    assert tree.depths() == [0, 1, 2, 3, 3, 2, 4]
    assert tree.ancestors() == [0b1, 0b11, 0b111, 0b1111, 0b10111, 0b100011, 0b1001111]
    assert tree.path(6) == [0, 1, 2, 3, 6]
    assert trie([1], [[2, 3]]).is_chain


def test_ancestors_of_deep_trees_pass_64_bits() -> None:
    tree = TokenTree(range(150), [-1, 0, *[i - 2 for i in range(2, 150)]], 1)
    tree.check()
    sets = tree.ancestors()
    assert sets[149] == sum(1 << i for i in range(1, 150, 2)) | 1
    assert sets[148] == sum(1 << i for i in range(0, 149, 2))


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (TokenTree([], [], 1), None),
        (TokenTree([1, 2], [-1], 1), None),
        (TokenTree([1, 2], [-1, 0], 3), None),
        (TokenTree([1, 2], [-1, 0], 0), None),
        (TokenTree([1, 2], [-1, -1], 1), "precede"),
        (TokenTree([1, 2, 3], [-1, 2, 1], 1), "precede"),
        (TokenTree([1, 2, 3], [-1, 0, 0], 3), "given nodes form a chain"),
        (TokenTree([1, 2, 3], [-1, 0, 0], 2), "hang off"),
        (TokenTree([1, 2, 2], [-1, 0, 0], 1), "siblings"),
    ],
)
def test_check_finds_malformed_trees(tree: TokenTree, message: str | None) -> None:
    with pytest.raises(AssertionError, match=message):
        tree.check()
