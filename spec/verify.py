"""Which guesses were right: the walk down each row's tree.

The target has drawn one token at every node (sampling.choose). A guess is hit if it is the token
drawn at its parent; starting at the row's last given node the walk follows hits for as long as
there are any. Siblings carry different tokens, so at most one of them is hit. Knows nothing of
probabilities or of who guessed, and reads nothing back from the device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch


@dataclass(frozen=True, slots=True)
class Verdict:
    """What verification decided for B rows; all int64, node = index among the batch's N nodes.

    path: [B, D] accepted guesses in order, -1 behind them. accepted: [B] how many. leaf: [B] node
    where the walk ended. bonus: [B] the token drawn at the leaf, -1 for rows without logits there.
    """

    path: Tensor
    accepted: Tensor
    leaf: Tensor
    bonus: Tensor


def walk(batch: TreeBatch, chosen: Tensor, depth: int) -> Verdict:
    """Follow the hits in every row.

    chosen: [M] token drawn at each node with logits. depth: D, at least the length of the longest
    chain of guesses below a last given node; 0 = no guesses in the batch, which costs next to
    nothing. Guesses whose parent has no logits are never accepted.
    """
    nodes, rows = len(batch), batch.rows
    device = chosen.device
    if depth == 0:
        leaf = batch.node_ptr[1:] - 1  # [B] the last node of each row, given like all
        bonus = chosen if nodes == rows == len(chosen) else _drawn(batch, chosen, leaf)
        none = leaf.new_zeros(rows)
        return Verdict(leaf.new_empty((rows, 0)), none, leaf, bonus)
    guess = batch.given == 0
    up = batch.parents.clamp(min=0)
    hit = guess & (_drawn(batch, chosen, up) == batch.tokens)  # [N]
    # next_of[i] = the child of node i that was hit, or -1; the extra cell takes what isn't meant.
    next_of = torch.full((nodes + 1,), -1, dtype=torch.int64, device=device)
    next_of.scatter_(0, torch.where(hit, up, nodes), torch.arange(nodes, device=device))
    next_of.narrow(0, nodes, 1).fill_(-1)  # an index with a scalar is no part of a graph
    given = torch.zeros(rows, dtype=torch.int64, device=device)
    given.index_add_(0, batch.row_of, batch.given)
    leaf = batch.node_ptr[:-1] + given - 1  # [B]
    steps: list[Tensor] = []
    at = leaf
    for _ in range(depth):
        at = next_of[at]  # -1, once reached, reads the extra cell: -1 again
        leaf = torch.where(at >= 0, at, leaf)
        steps.append(at)
    path = torch.stack(steps, 1)  # [B, D]
    return Verdict(path, (path >= 0).sum(1), leaf, _drawn(batch, chosen, leaf))


def _drawn(batch: TreeBatch, chosen: Tensor, nodes: Tensor) -> Tensor:
    """The token drawn at each of `nodes`, or the one that must follow; -1 where there is none."""
    at = batch.logit_of[nodes]
    if len(chosen) == 0:
        return -2 - at
    return torch.where(at >= 0, chosen[at.clamp(min=0)], -2 - at)
