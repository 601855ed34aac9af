"""Level-by-level growth of draft trees, shared by all drafters that run token after token.

Source: EAGLE-2's dynamic tree (expand by cumulative log-probability, then keep the best nodes of
all levels); children are ordered after adding the target's own position-keyed noise, which at T > 0
makes a draft agree with the target's sample far more often. Everything stays on the device: sizes
are known beforehand, nothing is read back.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from spec_serve.cache.batch import WORD, TreeBatch
from spec_serve.draft.base import Noise, Plan, Seen, Trees

Forward = Callable[[TreeBatch, Tensor | None], tuple[Tensor, Tensor | None]]


def _bits(node: Tensor, words: int) -> Tensor:
    """[...] node numbers -> [..., words] int64 words with that one bit set."""
    word = torch.arange(words, device=node.device)
    bit = torch.ones_like(node) << (node % WORD)
    return torch.where((node // WORD).unsqueeze(-1) == word, bit.unsqueeze(-1), 0)


def grow(
    logits: Tensor,
    state: Tensor | None,
    seen: Seen,
    grants: Tensor,
    plan: Plan,
    noise: Noise,
    forward: Forward,
    ids: Tensor | None = None,
) -> Trees:
    """Grow one tree per row below its newest token.

    logits: [B, V] the draft's for each row's next token. state: [B, H] features fed back to the
    draft, or None. grants: [B, >= depth-1 * width] slots for expanded nodes. forward: runs the
    draft on a batch of nodes with the features of their parents' outputs ([N, H] or None) and
    returns (logits [N, V], features [N, H] or None). ids: [V] the target's id of each of the
    draft's, None = the same.
    """
    rows, device = logits.shape[0], logits.device
    width = min(plan.width, logits.shape[1])
    words = max(1, -(-((plan.depth - 1) * width) // WORD))
    row_index = torch.arange(rows, device=device)

    def children(scores: Tensor, at: Tensor, depth: int) -> tuple[Tensor, Tensor]:
        """Top `width` children of each of K nodes: ids and log-probabilities, [K, width]."""
        noisy = noise.add(scores, at, seen.length[at] + depth - 1, ids)
        value, token = noisy.topk(width, dim=-1)
        return token if ids is None else ids[token], value - noisy.logsumexp(-1, keepdim=True)

    token, score = children(logits, row_index, 1)  # [B, k]
    tokens, scores = [token], [score]
    parents = [torch.full_like(token, -1)]
    # The frontier: candidate number, expanded-node number and ancestor bits of each of its nodes.
    front_token, front_score = token, score
    front_at = torch.arange(width, device=device).expand(rows, width)
    lineage = torch.zeros(rows, width, words, dtype=torch.int64, device=device)
    front_state = None if state is None else state.unsqueeze(1).expand(rows, width, -1)
    made = width
    for level in range(1, plan.depth):
        first = (level - 1) * width
        number = torch.arange(first, first + width, device=device)
        lineage = lineage | _bits(number, words)  # [B, k, W]
        count = rows * width
        batch = TreeBatch(
            tokens=front_token.reshape(-1),
            positions=(seen.length + level - 1).repeat_interleave(width),
            parents=torch.full((count,), -1, device=device),
            slots=grants[:, first : first + width].reshape(-1),
            row_of=row_index.repeat_interleave(width),
            ancestors=lineage.reshape(count, words),
            given=torch.zeros(count, dtype=torch.int64, device=device),
            logit_of=torch.arange(count, device=device),
            logits_at=torch.arange(count, device=device),
            node_ptr=torch.arange(rows + 1, device=device) * width,
            twig_ptr=torch.arange(rows + 1, device=device) * (first + width),
            twig_slots=grants[:, : first + width].reshape(-1),
            row_ids=seen.batch.row_ids,
            prefix=seen.length,
            chain=torch.zeros(rows, dtype=torch.int64, device=device),
        )
        fed = None if front_state is None else front_state.reshape(count, -1)
        out, features = forward(batch, fed)
        token, score = children(out, batch.row_of, level + 1)  # [B*k, k]
        token = token.view(rows, width * width)
        score = (score.view(rows, width, width) + front_score.unsqueeze(-1)).view(rows, -1)
        tokens.append(token)
        scores.append(score)
        parents.append(front_at.repeat_interleave(width, dim=1))
        front_score, pick = score.topk(width, dim=-1)  # [B, k]
        front_token = token.gather(1, pick)
        front_at = made + pick
        above = pick // width
        lineage = lineage.gather(1, above.unsqueeze(-1).expand(-1, -1, words))
        if features is not None:
            wide = features.view(rows, width, -1)
            front_state = wide.gather(1, above.unsqueeze(-1).expand(-1, -1, wide.shape[-1]))
        made += width * width
    return rerank(torch.cat(tokens, 1), torch.cat(parents, 1), torch.cat(scores, 1), plan.nodes)


def rerank(tokens: Tensor, parents: Tensor, scores: Tensor, nodes: int) -> Trees:
    """Keep the `nodes` best candidates of each row, renumbered in order of creation.

    A child's score never exceeds its parent's, and a stable sort keeps the earlier of equals, so
    every kept node's parent is kept. tokens, parents, scores: [B, C].
    """
    rows, total = tokens.shape
    kept = min(nodes, total)
    order = scores.sort(dim=-1, descending=True, stable=True).indices[:, :kept]
    order = order.sort(dim=-1).values  # [B, G] candidate numbers, ascending
    place = torch.full((rows, total + 1), -1, dtype=torch.int64, device=tokens.device)
    place.scatter_(1, order, torch.arange(kept, device=tokens.device).expand(rows, kept))
    above = parents.gather(1, order)
    return Trees(
        tokens=tokens.gather(1, order),
        parents=place.gather(1, torch.where(above < 0, total, above)),
        score=scores.gather(1, order),
        count=torch.full((rows,), kept, dtype=torch.int64, device=tokens.device),
    )
