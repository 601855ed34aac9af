"""What a step made certain, as drafters see it: known tokens, accepted guesses, the newest token.

How many guesses were accepted is known only on the device, so every chain is as long as it can get;
what is not used is padding at its end, written to TRASH. Reads nothing back. Knows verdicts and
batches; no models.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import TRASH
from spec_serve.cache.tree import TokenTree
from spec_serve.draft.base import Seen
from spec_serve.spec.choice import RowSampling
from spec_serve.spec.nodes import sent
from spec_serve.spec.verify import Verdict


@dataclass(slots=True)
class DraftRow:
    """One row's part in drafting: batch row `b`; `known` tokens from position `start` on are
    certain and lack draft K/V (slots beside them); `state` and `seed` belong to its noise."""

    b: int
    start: int
    known: Sequence[int]
    slots: Sequence[int]
    grants: Sequence[int]
    state: RowSampling


@dataclass(frozen=True, slots=True)
class Step:
    """The part of a step that drafters are shown. next_slots, next_tokens, depth: see `Job`."""

    twigs: Sequence[Twig]
    next_slots: Sequence[int]
    next_tokens: Sequence[int]
    depth: int
    drafting: Sequence[DraftRow]


def seen_by(step: Step, batch: TreeBatch, verdict: Verdict, taps: Tensor | None) -> Seen:
    """The drafting rows' chains. taps: [N, T * H] of the step's nodes, None = not asked for."""
    device = batch.tokens.device
    width = step.depth + 1
    twigs: list[Twig] = []
    source: list[int] = []
    last: list[int] = []
    for row in step.drafting:
        known, deepest = len(row.known), width
        tokens = [*row.known, *([0] * deepest)]
        tree = TokenTree(tokens, range(-1, len(tokens) - 1), len(tokens))
        slots = [*row.slots, *([TRASH] * deepest)]
        last.append(len(source) + known)
        source += [-1] * known
        source += range(row.b * width, row.b * width + deepest)
        twigs.append(Twig(step.twigs[row.b].row, row.start, tree, slots, len(tokens)))
    following, next_slots, index, rows, at = sent(
        device, step.next_tokens, step.next_slots, source, [row.b for row in step.drafting], last
    )
    accepted, leaf = verdict.accepted, verdict.leaf
    path = verdict.path if step.depth else verdict.path.new_full((batch.rows, 1), -1)
    safe = path.clamp_min(0)
    following = torch.where(following < 0, verdict.bonus, following)
    column = accepted.unsqueeze(1)
    tail_token = torch.where(path < 0, 0, batch.tokens[safe])
    tail_slot = torch.where(path < 0, TRASH, batch.slots[safe])
    if step.depth:
        tail_token = torch.cat((tail_token, tail_token.new_zeros(batch.rows, 1)), 1)
        tail_slot = torch.cat((tail_slot, tail_slot.new_zeros(batch.rows, 1)), 1)
    tail_token = tail_token.scatter(1, column, following.unsqueeze(1))
    tail_slot = tail_slot.scatter(1, column, next_slots.unsqueeze(1))
    chain = build_batch(twigs, device)
    picked = index.clamp_min(0)
    tokens_ = torch.where(index < 0, chain.tokens, tail_token.reshape(-1)[picked])
    slots_ = torch.where(index < 0, chain.slots, tail_slot.reshape(-1)[picked])
    at = at + accepted[rows]
    seen = replace(chain, tokens=tokens_, slots=slots_, twig_slots=slots_, logits_at=at)
    length = batch.positions[leaf[rows]] + 2
    features = None
    if taps is not None:
        features = _features(step, batch, verdict, len(chain), taps)
    begins = any(row.start == 0 for row in step.drafting)
    return Seen(seen, at, length, features, begins)


def _features(step: Step, batch: TreeBatch, verdict: Verdict, nodes: int, taps: Tensor) -> Tensor:
    """Taps of each seen token's predecessor; zeros where there is none (position 0)."""
    width = step.depth + 1
    # Nodes at the end of which each tail token stands: last given node, then the path.
    start_of = [0]
    for twig in step.twigs:
        start_of.append(start_of[-1] + len(twig.slots))
    source: list[int] = []
    flat: list[int] = []
    for row in step.drafting:
        twig = step.twigs[row.b]
        for position in range(row.start, row.start + len(row.known)):
            node = position - 1 - twig.prefix
            assert node >= 0 or position == 0, "a tapping drafter must see every token"
            source.append(start_of[row.b] + node if node >= 0 else -1)
            flat.append(-1)
        source += [-1] * width
        flat += range(row.b * width, (row.b + 1) * width)
    given = [twig.tree.given - 1 for twig in step.twigs]
    direct, tail, last = sent(taps.device, source, flat, given)
    before = (batch.node_ptr[:-1] + last).unsqueeze(1)
    if step.depth:
        before = torch.cat((before, verdict.path.clamp_min(0)), 1)  # [B, width]
    node_index = torch.where(tail < 0, direct, before.reshape(-1)[tail.clamp_min(0)])
    assert node_index.shape[0] == nodes
    gathered = taps[node_index.clamp_min(0)]
    return torch.where((node_index < 0).unsqueeze(1), 0, gathered)
