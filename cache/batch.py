"""Many trees as one ragged batch of tensors: what a model's forward reads.

The host describes each row's part as a `Twig`; `build_batch` packs all of them into a single int64
buffer, so that a device receives them by one copy. A batch may also hold only the newest nodes of
each twig (a drafter growing its tree level by level): then the older nodes' K/V already lie in the
pool at `twig_slots`. Knows nothing of models, sampling or requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spec_serve.cache.tree import TokenTree

WORD = 64


@dataclass(slots=True)
class Twig:
    """One row's nodes of a step.

    row: index into the pool's table. prefix: tokens of the row already cached (the table holds
    their slots). slots: one per node. logits_from: first node whose logits are wanted; that node
    and all later ones get logits (len(tree) = none), save those in `forced`: node -> the token that
    follows it whatever the logits are.
    """

    row: int
    prefix: int
    tree: TokenTree
    slots: Sequence[int]
    logits_from: int
    forced: Mapping[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class TreeBatch:
    """N query nodes of B rows; W words of 64 ancestor bits; S twig nodes (= N unless growing).

    All tensors are int64 on the model's device. `ancestors` is read only for rows that are not
    chains; bit j of a node = the row's twig node j is an ancestor or the node itself.
    """

    tokens: Tensor  # [N]
    positions: Tensor  # [N] absolute, 0-based
    parents: Tensor  # [N] index of the parent among the N, -1 at the top of a twig
    slots: Tensor  # [N] where each node's K/V is written
    row_of: Tensor  # [N] index 0..B-1
    ancestors: Tensor  # [N, W]
    given: Tensor  # [N] 1 = known to be true
    logit_of: Tensor  # [N] index among the M logits; -1 = none, -2 - t = none, as token t follows
    logits_at: Tensor  # [M] nodes whose logits are wanted
    node_ptr: Tensor  # [B+1] rows' query nodes
    twig_ptr: Tensor  # [B+1] rows' twig nodes
    twig_slots: Tensor  # [S]
    row_ids: Tensor  # [B] row of the pool's table
    prefix: Tensor  # [B] cached tokens before the twig
    chain: Tensor  # [B] 1 = each node's parent is the node before it, and all nodes are queries

    def __len__(self) -> int:
        return int(self.tokens.shape[0])

    @property
    def rows(self) -> int:
        return int(self.row_ids.shape[0])


def _signed_words(bits: int, words: int) -> list[int]:
    """Split a bit set into `words` int64 values, lowest first."""
    out = []
    for _ in range(words):
        word = bits & 0xFFFF_FFFF_FFFF_FFFF
        out.append(word - (1 << 64) if word >> 63 else word)
        bits >>= 64
    return out


def build_batch(twigs: Sequence[Twig], device: torch.device | str = "cpu") -> TreeBatch:
    """Concatenate `twigs` in order; row b of the batch is twigs[b]."""
    tokens: list[int] = []
    positions: list[int] = []
    parents: list[int] = []
    slots: list[int] = []
    row_of: list[int] = []
    given: list[int] = []
    logit_of: list[int] = []
    logits_at: list[int] = []
    node_ptr = [0]
    row_ids: list[int] = []
    prefix: list[int] = []
    chains: list[bool] = []
    bushy: list[tuple[int, TokenTree]] = []
    widest = 0
    for b, twig in enumerate(twigs):
        tree, start, first = twig.tree, len(tokens), twig.prefix
        n = len(tree.tokens)
        tokens += tree.tokens
        slots += twig.slots
        if n == 1:
            positions.append(first)
            parents.append(-1)
            row_of.append(b)
            given.append(1)
            is_chain = True
        else:
            row_of += [b] * n
            given += [1] * tree.given + [0] * (n - tree.given)
            is_chain = tree.is_chain
            parents.append(-1)
            parents += [start + parent for parent in tree.parents[1:]]
            if is_chain:
                positions += range(first, first + n)
            else:
                positions += [first + depth for depth in tree.depths()]
                bushy.append((start, tree))
                widest = max(widest, n)
        wanted = twig.logits_from
        if twig.forced:
            logit_of += [-1] * wanted
            for node in range(wanted, n):
                token = twig.forced.get(node)
                logit_of.append(len(logits_at) if token is None else -2 - token)
                if token is None:
                    logits_at.append(start + node)
        elif wanted < n:
            logit_of += [-1] * wanted
            logit_of += range(len(logits_at), len(logits_at) + n - wanted)
            logits_at += range(start + wanted, start + n)
        else:
            logit_of += [-1] * n
        node_ptr.append(start + n)
        row_ids.append(twig.row)
        prefix.append(first)
        chains.append(is_chain)
    assert len(slots) == len(tokens), "one slot per node"
    lists = (
        tokens, positions, parents, slots, row_of, given, logit_of,
        node_ptr, row_ids, prefix, chains, logits_at,
    )  # fmt: skip
    words = max(1, -(-widest // WORD))
    return _pack(lists, _ancestor_words(len(tokens), words, bushy), device)


def _ancestor_words(
    count: int, words: int, bushy: Sequence[tuple[int, TokenTree]]
) -> npt.NDArray[np.int64]:
    """[count, words] ancestor bits; filled for the given trees only, each at its first node."""
    ancestors = np.zeros((count, words), dtype=np.int64)
    for start, tree in bushy:
        sets = tree.ancestors()
        if words == 1:
            part = np.array(sets, dtype=np.uint64).view(np.int64)
            ancestors[start : start + len(tree), 0] = part
        else:
            for i, bits in enumerate(sets):
                ancestors[start + i] = _signed_words(bits, words)
    return ancestors


def _pack(
    lists: Sequence[Sequence[int]], ancestors: npt.NDArray[np.int64], device: torch.device | str
) -> TreeBatch:
    """One buffer for everything, and the batch as views of it."""
    flat = np.array([value for part in lists for value in part], dtype=np.int64)
    count, words = ancestors.shape
    packed = torch.from_numpy(np.concatenate((flat, ancestors.reshape(-1))))
    device = torch.device(device)
    if device.type != "cpu":
        packed = packed.pin_memory().to(device, non_blocking=True)
    parts = packed.split_with_sizes([*(len(part) for part in lists), count * words])
    return TreeBatch(
        tokens=parts[0],
        positions=parts[1],
        parents=parts[2],
        slots=parts[3],
        row_of=parts[4],
        given=parts[5],
        logit_of=parts[6],
        node_ptr=parts[7],
        twig_ptr=parts[7],
        row_ids=parts[8],
        prefix=parts[9],
        chain=parts[10],
        logits_at=parts[11],
        ancestors=parts[12].view(count, words),
        twig_slots=parts[3],
    )
