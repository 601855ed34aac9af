"""How many guesses of a head the target would have accepted on held-out greedy answers.

Drafts a chain from every place of an answer, all places at once, the way a server does: true
features up to the place, the head's own outputs and tokens from there on. As the answers are
greedy, a guess is accepted exactly if it is the answer's token. Trees and other temperatures are
measured by an engine with the exported head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from spec_serve.draft.train.head import EagleHead
from spec_serve.draft.train.unroll import Example, attend


@dataclass(frozen=True, slots=True)
class Acceptance:
    """depths: of all places, the share whose chain was right up to depth 1, 2, ...

    per_step: tokens per step of a server that drafts such a chain every step (bonus included).
    """

    depths: tuple[float, ...]
    per_step: float


def chain_lengths(
    head: EagleHead, embedding: Tensor, kept: Tensor, example: Example, depth: int
) -> Tensor:
    """Right guesses in a row from each trained pair, [Q] int64; kept: [D] the head's target ids."""
    tokens, first = example.tokens, example.first
    device = tokens.device
    embedded = F.embedding(tokens[1:-1], embedding)  # [P, H]
    feature = head.fuse(example.taps[:-2].float())
    positions = torch.arange(len(tokens) - 2, device=device)
    inputs = head.inputs(embedded, feature)
    key, value = head.keys(inputs, positions)
    keys, values = [key], [value]
    feature, inner, at = feature[first:], inputs[first:], positions[first:]
    right = torch.ones(len(at), dtype=torch.bool, device=device)
    lengths = torch.zeros(len(at), dtype=torch.int64, device=device)
    for step in range(depth):
        attended = attend(head.queries(inner, at), keys, values, first)
        feature = head.finish(feature, attended)
        guess = kept[head.logits(feature).argmax(-1)]  # [Q]
        place = at + 2
        truth = tokens[place.clamp(max=len(tokens) - 1)]
        right = right & (guess == truth) & (place < len(tokens))
        lengths += right
        if step + 1 < depth:
            at = at + 1
            inner = head.inputs(F.embedding(guess, embedding), feature)
            key, value = head.keys(inner, at)
            keys.append(key)
            values.append(value)
    return lengths


def measure(
    head: EagleHead, embedding: Tensor, kept: Tensor, examples: Sequence[Example], depth: int = 5
) -> Acceptance:
    """Acceptance over all answers, `depth` guesses a step."""
    reached = torch.zeros(depth, dtype=torch.float64)
    places = tokens = steps = 0
    with torch.no_grad():
        for example in examples:
            lengths = chain_lengths(head, embedding, kept, example, depth).tolist()
            places += len(lengths)
            reached += torch.tensor(
                [sum(length > d for length in lengths) for d in range(depth)], dtype=torch.float64
            )
            at = 0
            while at < len(lengths):
                steps += 1
                taken = min(lengths[at] + 1, len(lengths) - at)
                tokens += taken
                at += taken
    return Acceptance(tuple((reached / max(places, 1)).tolist()), tokens / max(steps, 1))
