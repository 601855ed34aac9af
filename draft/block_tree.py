"""The best tree out of one pass: scores for every depth at once, as block drafters give them.

Each depth has one distribution, so a path's score is the sum of its depths' log-probabilities and
the best n paths are found exactly by keeping the best n nodes of every depth (DDTree's and
JetSpec's best-first tree, level by level instead of by a heap, so that nothing leaves the device).
A Markov head makes a depth's scores depend on the token before.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spec_serve.draft.base import Noise, Plan, Trees
from spec_serve.draft.grow import rerank

Bias = Callable[[Tensor], Tensor]
"""[K] target ids of the tokens before -> [K, V] what is added to the logits of those after."""


def block_tree(
    logits: Tensor,
    length: Tensor,
    newest: Tensor,
    plan: Plan,
    noise: Noise,
    ids: Tensor | None = None,
    bias: Bias | None = None,
) -> Trees:
    """The `plan.nodes` best nodes below each row's newest token.

    logits: [B, D, V] for depths 1..D. length: [B] tokens of the rows, newest: [B] the last of
    them. plan.width: children of a node that are looked at; with `bias`, also nodes of a depth
    that are followed. ids: [V] the target's id of each column, None = the same.
    """
    rows, depth, vocab = logits.shape
    width = min(plan.width, vocab)
    device = logits.device
    row = torch.arange(rows, device=device)
    most = plan.nodes if bias is None else width
    front_token = newest.unsqueeze(1)  # [B, F]
    front_score = torch.zeros(rows, 1, device=device)
    front_at = torch.full((rows, 1), -1, dtype=torch.int64, device=device)
    tokens: list[Tensor] = []
    scores: list[Tensor] = []
    parents: list[Tensor] = []
    made = 0
    for level in range(min(depth, plan.depth)):
        front = front_token.shape[1]
        if bias is None:
            noisy = noise.add(logits[:, level], row, length + level, ids)
            value, column = noisy.topk(width, dim=-1)
            chance = value - noisy.logsumexp(-1, keepdim=True)  # [B, W]
            column = column.unsqueeze(1).expand(rows, front, width)
            chance = chance.unsqueeze(1).expand(rows, front, width)
        else:
            told = bias(front_token.reshape(-1)).view(rows, front, vocab)
            flat = (logits[:, level].unsqueeze(1) + told).view(rows * front, vocab)
            at = row.repeat_interleave(front)
            noisy = noise.add(flat, at, length[at] + level, ids)
            value, column = noisy.topk(width, dim=-1)
            chance = (value - noisy.logsumexp(-1, keepdim=True)).view(rows, front, width)
            column = column.view(rows, front, width)
        token = column if ids is None else ids[column]
        token = token.reshape(rows, -1)
        score = (front_score.unsqueeze(-1) + chance).reshape(rows, -1)  # [B, F * W]
        tokens.append(token)
        scores.append(score)
        parents.append(front_at.repeat_interleave(width, dim=1))
        front_score, pick = score.topk(min(most, score.shape[1]), dim=-1)
        front_token = token.gather(1, pick)
        front_at = made + pick
        made += token.shape[1]
    return rerank(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), plan.nodes)
