"""Several texts that may follow a prompt, as one tree: scored in a single pass of the target.

The tree hangs off the prompt's last node and is run once, in the step that yields the first token.
Beginnings that continuations share are one node. Knows structure only; no engine, no tensors.
"""

from __future__ import annotations

from collections.abc import Sequence

from spec_serve.cache.tree import TokenTree


def tree_of(
    given: Sequence[int], continuations: Sequence[Sequence[int]]
) -> tuple[TokenTree, list[list[int]]]:
    """The tree behind the `given` nodes, and per continuation its nodes from the first on."""
    tokens, parents = list(given), list(range(-1, len(given) - 1))
    children: dict[tuple[int, int], int] = {}
    chains: list[list[int]] = []
    for continuation in continuations:
        at, chain = len(given) - 1, []
        for token in continuation:
            node = children.get((at, token))
            if node is None:
                node = children[at, token] = len(tokens)
                tokens.append(token)
                parents.append(at)
            chain.append(node)
            at = node
        chains.append(chain)
    return TokenTree(tokens, parents, len(given)), chains
