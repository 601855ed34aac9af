"""Token trees: the one shape everything takes that the target ever runs.

A tree hangs off a row's cached prefix. Its first `given` nodes are a chain of tokens known to be
true (prompt tokens, or the last emitted token); every later node is a guess. Node i's parent comes
before i. This module knows tokens and structure only: no slots, no models, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenTree:
    """Nodes in topological order.

    tokens: token id of each node.
    parents: index of each node's parent in this tree; -1 for node 0, which follows the prefix.
    given: how many leading nodes are known to be true (>= 1); they form a chain.
    """

    tokens: Sequence[int]
    parents: Sequence[int]
    given: int

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def is_chain(self) -> bool:
        """True if every node's parent is the node before it."""
        return self.given == len(self.tokens) or all(
            parent == i - 1 for i, parent in enumerate(self.parents)
        )

    def depths(self) -> list[int]:
        """Distance of each node from node 0, which has depth 0."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
        return depths

    def ancestors(self) -> list[int]:
        """Per node, the bit set of its ancestors and itself (bit j = node j), as Python ints."""
        sets: list[int] = []
        for i, parent in enumerate(self.parents):
            sets.append((sets[parent] if parent >= 0 else 0) | 1 << i)
        return sets

    def path(self, node: int) -> list[int]:
        """Node indices from node 0 down to `node`."""
        path = [node]
        while self.parents[path[-1]] >= 0:
            path.append(self.parents[path[-1]])
        path.reverse()
        return path

    def check(self) -> None:
        """Assert the structure: parents first, one root, a given chain, distinct siblings."""
        assert len(self.tokens) == len(self.parents) and 1 <= self.given <= len(self.tokens)
        seen: set[tuple[int, int]] = set()
        for i, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True)):
            assert parent == -1 if i == 0 else 0 <= parent < i, "parents precede their children"
            assert i >= self.given or parent == i - 1, "given nodes form a chain"
            assert i < self.given or parent >= self.given - 1, "guesses hang off the given end"
            assert (parent, token) not in seen, "siblings carry different tokens"
            seen.add((parent, token))


def chain(tokens: Sequence[int], given: int | None = None) -> TokenTree:
    """A chain; all nodes given unless said otherwise (a prompt chunk)."""
    return TokenTree(tokens, range(-1, len(tokens) - 1), len(tokens) if given is None else given)


def root(token: int) -> TokenTree:
    """One given node: plain decoding."""
    return TokenTree((token,), (-1,), 1)


def trie(given: Sequence[int], branches: Sequence[Sequence[int]]) -> TokenTree:
    """The given chain with `branches` merged below its end by common prefixes."""
    tokens, parents = list(given), list(range(-1, len(given) - 1))
    children: dict[tuple[int, int], int] = {}
    for branch in branches:
        at = len(given) - 1
        for token in branch:
            child = children.get((at, token))
            if child is None:
                child = children[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            at = child
    return TokenTree(tokens, parents, len(given))
