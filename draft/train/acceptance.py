"""How many guesses of a head the target would have accepted on held-out greedy answers.

Drafts a chain from every place of an answer, all places at once, the way a server does: true
features up to the place, the head's own outputs and tokens from there on. As the answers are
greedy, a guess is accepted exactly if it is the answer's token. Trees and other temperatures are
measured by an engine with the exported head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
    """Acceptance of an EAGLE-3 head over all answers, `depth` guesses a step."""
    with torch.no_grad():
        return tally(
            (chain_lengths(head, embedding, kept, one, depth).tolist() for one in examples), depth
        )


def tally(answers: Iterable[Sequence[int]], depth: int) -> Acceptance:
    """Sum up the right guesses in a row from each place of each answer."""
    reached = [0] * depth
    places = tokens = steps = 0
    for lengths in answers:
        places += len(lengths)
        for d in range(depth):
            reached[d] += sum(length > d for length in lengths)
        taken, needed = served(lengths)
        tokens, steps = tokens + taken, steps + needed
    shares = tuple(count / max(places, 1) for count in reached)
    return Acceptance(shares, tokens / max(steps, 1))


def served(lengths: Sequence[int]) -> tuple[int, int]:
    """(tokens, steps) of a server that drafts from every place it comes to."""
    at = steps = 0
    while at < len(lengths):
        steps += 1
        at += lengths[at] + 1
    return len(lengths), steps
