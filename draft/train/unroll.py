"""Training-time test: a head run several steps on its own outputs, and the loss of each step.

Source: EAGLE-3 (arXiv 2503.01840). At step s a pair reads the head's output of step s-1 at the pair
before it, and attends to what drafting would have in the cache: keys of true features up to where
its chain began, then the chain's own keys of steps 2 to s. Keys are computed for all tokens of a
sequence, queries only where a guess would be made: from the answer's first token on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.train.head import EagleHead


@dataclass(frozen=True, slots=True)
class Example:
    """One sequence of n tokens: n - 2 pairs, of which those from `first` on are trained.

    tokens: [n] int64. taps: [n, T * H]. hidden: [n, H] after the target's final norm. known: [n]
    bool, the target's likeliest token there is one the head can propose.
    """

    tokens: Tensor
    taps: Tensor
    hidden: Tensor
    known: Tensor
    first: int


@dataclass(frozen=True, slots=True)
class Unrolled:
    """What one batch gave, per step: sums over its pairs, [S] each.

    loss: cross-entropy against the target's distribution; agreed: pairs whose likeliest token is
    the target's; pairs: how many there were; counted: those whose best token the head knows.
    """

    loss: Tensor
    agreed: Tensor
    pairs: Tensor
    counted: Tensor


@dataclass(frozen=True, slots=True)
class Picked:
    """The part of the draft vocabulary one batch is scored on.

    ids: [C] draft ids. weight: [C] how many ids each stands for: 1 for those the target favours
    somewhere in the batch, more for those drawn at random from the others.
    """

    ids: Tensor
    weight: Tensor


class Teacher:
    """The target's distribution over the draft vocabulary. rows: [D, H] of its output head.

    candidates: ids a batch is scored on (see `Picked`), 0 = all. Half of the cost of training is
    the output layer; a softmax over a sample of it, its random part weighed up to the whole, has
    nearly the same gradient.
    """

    FAVOURED = 8  # of a pair's likeliest ids are among its batch's candidates

    def __init__(self, rows: Tensor, candidates: int = 0, seed: int = 0) -> None:
        self._rows = rows
        self._candidates = min(candidates, rows.shape[0])
        self._seed = seed

    def pick(self, wanted: Tensor, salt: int) -> Picked | None:
        """The candidates of a batch with these probabilities [Q, D], None = all ids."""
        if not self._candidates:
            return None
        size, device = wanted.shape[1], wanted.device
        mark = torch.zeros(size, dtype=torch.bool, device=device)
        mark[wanted.topk(min(self.FAVOURED, size), -1).indices.flatten()] = True
        favoured, others = mark.nonzero().squeeze(1), (~mark).nonzero().squeeze(1)
        room = min(max(self._candidates - len(favoured), len(others) // 16), len(others))
        chance = torch.Generator().manual_seed(self._seed * 1_000_003 + salt)
        drawn = others[torch.randperm(len(others), generator=chance)[:room].to(device)]
        weight = torch.ones(len(favoured) + room, device=device)
        weight[len(favoured) :] = len(others) / max(room, 1)
        return Picked(torch.cat((favoured, drawn)), weight)

    def __call__(self, hidden: Tensor) -> Tensor:
        """hidden [N, H] -> probabilities [N, D], renormalised over the head's vocabulary."""
        with torch.no_grad():
            logits = F.linear(hidden.to(self._rows.dtype), self._rows)
            return logits.float().softmax(-1)


def unroll(
    head: EagleHead,
    embedding: Tensor,
    teacher: Teacher,
    examples: Sequence[Example],
    steps: int,
    salt: int = 0,
) -> Unrolled:
    """Run a batch of sequences; embedding is the target's, [V, H]; salt varies random candidates.

    Sequences never see each other. Every one needs at least `steps` trained pairs.
    """
    device = embedding.device
    spans = [len(example.tokens) - 2 for example in examples]  # pairs per sequence
    firsts = [example.first for example in examples]
    embedded = F.embedding(torch.cat([e.tokens[1:-1] for e in examples]), embedding)  # [P, H]
    fused = head.fuse(torch.cat([e.taps[:-2].float() for e in examples]))  # [P, H]
    positions = torch.cat([torch.arange(span, device=device) for span in spans])
    inputs = head.inputs(embedded, fused)
    k, v = head.keys(inputs, positions)
    # Keys and values per sequence: those of true features, then those of the chains' steps.
    keys = [[part] for part in k.split_with_sizes(spans)]
    values = [[part] for part in v.split_with_sizes(spans)]
    starts = torch.tensor([0, *spans[:-1]]).cumsum(0).tolist()

    def of_step(step: int) -> Tensor:
        """The pairs with a guess at `step`, numbered among the P."""
        parts = [
            torch.arange(start + first + step, start + span, device=device)
            for start, span, first in zip(starts, spans, firsts, strict=True)
        ]
        return torch.cat(parts)

    told = teacher(torch.cat([e.hidden[1 + e.first : -1].float() for e in examples]))  # [Q, D]
    picked = teacher.pick(told, salt)
    if picked is not None:
        told = told[:, picked.ids] * picked.weight
    trained = [span - first for span, first in zip(spans, firsts, strict=True)]
    wanted = told.split_with_sizes(trained)
    known = [e.known[1 + e.first : -1] for e in examples]
    sums: list[tuple[Tensor, Tensor, int, Tensor]] = []
    out: Tensor | None = None
    for step in range(steps):
        pairs = of_step(step)
        counts = [count - step for count in trained]
        assert min(counts) > 0, "a sequence has fewer trained pairs than steps"
        if out is None:
            feature, inner = fused[pairs], inputs[pairs]
        else:
            # The output at a pair is the next pair's feature.
            before = out.split_with_sizes([count + 1 for count in counts])
            feature = torch.cat([part[:-1] for part in before])
            inner = head.inputs(embedded[pairs], feature)
            k, v = head.keys(inner, positions[pairs])
            for b, key in enumerate(k.split_with_sizes(counts)):
                keys[b].append(key)
            for b, value in enumerate(v.split_with_sizes(counts)):
                values[b].append(value)
        queries = head.queries(inner, positions[pairs]).split_with_sizes(counts)
        attended = torch.cat(
            [attend(q, keys[b], values[b], firsts[b]) for b, q in enumerate(queries)]
        )
        out = head.finish(feature, attended)
        logits = head.logits(out, None if picked is None else picked.ids).float()
        if picked is not None:
            logits = logits + picked.weight.log()
        left = torch.cat([part[step:] for part in wanted])
        sums.append(_judge(logits, left, torch.cat([part[step:] for part in known])))
    loss, agreed, total, counted = zip(*sums, strict=True)
    return Unrolled(
        torch.stack(loss), torch.stack(agreed), torch.tensor(total), torch.stack(counted)
    )


def attend(q: Tensor, keys: Sequence[Tensor], values: Sequence[Tensor], first: int) -> Tensor:
    """Attention of the queries of one step of one sequence, [Q, heads, D] -> the same.

    keys, values: [n, kv_heads, D] of true features, then of each chain step up to this one, the
    k-th of which begins at pair first + k. Query i belongs to the chain that began at pair
    first + i: of true features it sees those up to there, of each step its own chain's key alone.
    """
    count, heads, dim = q.shape
    kv_heads = keys[0].shape[1]
    grouped = q.view(count, kv_heads, heads // kv_heads, dim) * dim**-0.5
    scores = torch.einsum("qkgd,nkd->kgqn", grouped, keys[0])
    began = torch.arange(first, first + count, device=q.device)
    seen = torch.arange(keys[0].shape[0], device=q.device) <= began.unsqueeze(1)  # [Q, n]
    parts = [scores.float().masked_fill(~seen, -torch.inf)]
    parts += [
        torch.einsum("qkgd,qkd->kgq", grouped, key[:count]).float().unsqueeze(-1)
        for key in keys[1:]
    ]
    shares = torch.cat(parts, -1).softmax(-1)  # [kv, group, Q, n + step]
    prefix = keys[0].shape[0]
    mixed = torch.einsum("kgqn,nkd->qkgd", shares[..., :prefix], values[0])
    for place, value in enumerate(values[1:], prefix):
        own = shares[..., place].permute(2, 0, 1).unsqueeze(-1)  # [Q, kv, group, 1]
        mixed = mixed + own * value[:count].unsqueeze(2)
    return mixed.reshape(count, heads, dim)


def _judge(logits: Tensor, wanted: Tensor, known: Tensor) -> tuple[Tensor, Tensor, int, Tensor]:
    """(loss, agreed, pairs, counted) of one step, summed over its pairs."""
    cross = -(wanted * logits.log_softmax(-1)).sum(-1)
    right = (logits.argmax(-1) == wanted.argmax(-1)) & known
    return (cross * known).sum(), right.sum(), len(known), known.sum()
