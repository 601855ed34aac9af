"""Which of two heads guesses better on text neither was trained on, and whether that is chance.

Both draft a chain from every place a server would come to; what counts is the steps each would
need. Knows heads of EAGLE-3's plain form, as read from their files; no folders of servers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf, sqrt
from pathlib import Path

import torch

from spec_serve.draft.train.acceptance import chain_lengths, served
from spec_serve.draft.train.corpus import Corpus
from spec_serve.draft.train.head import EagleHead
from spec_serve.draft.train.start import Start
from spec_serve.draft.train.vocabulary import membership
from spec_serve.draft.train.warm import target_parts
from spec_serve.target.model import Weights

SURE = 1.64
"""Standard errors by which steps saved must exceed nothing: a chance of one in twenty at most."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Tokens per step of the head that is served and of the candidate on the same answers.

    sure: the steps saved, in standard errors of their sum over answers."""

    answers: int
    served: float
    candidate: float
    sure: float

    @property
    def better(self) -> bool:
        """Whether the candidate is, by more than chance."""
        return self.candidate > self.served and self.sure > SURE

    def told(self) -> str:
        """In a line."""
        how = "better" if self.better else "not better by more than chance"
        return (
            f"on the {self.answers} newest answers: {self.served:.3f} tokens per step with the head"
            f" that is served, {self.candidate:.3f} with the candidate: {how}"
        )


def judge(shards: Path, old: Start, new: Start, target: Weights, depth: int = 5) -> Verdict:
    """Draft through the captured answers of a folder with both heads."""
    parts = target_parts(target)
    found: list[list[tuple[int, int]]] = []
    for start in (old, new):
        head = EagleHead(start.shape)
        head.take(start.tensors)
        known = membership(start.kept, start.shape.vocab)
        counts = []
        with torch.no_grad():
            for example in Corpus(shards, known, 1).examples():
                lengths = chain_lengths(head, parts.embedding, start.kept, example, depth)
                counts.append(served(lengths.tolist()))
        found.append(counts)
    return verdict(found[0], found[1])


def verdict(old: Sequence[tuple[int, int]], new: Sequence[tuple[int, int]]) -> Verdict:
    """old, new: (tokens, steps) of each answer."""
    saved = [before - after for (_, before), (_, after) in zip(old, new, strict=True)]
    count = len(saved)
    mean = sum(saved) / max(count, 1)
    spread = sqrt(sum((one - mean) ** 2 for one in saved) / max(count - 1, 1))
    error = spread * sqrt(count)
    sure = sum(saved) / error if error > 0 else inf if mean > 0 else 0.0
    tokens = sum(tokens for tokens, _ in old)
    return Verdict(
        count,
        tokens / max(sum(steps for _, steps in old), 1),
        tokens / max(sum(steps for _, steps in new), 1),
        sure,
    )
