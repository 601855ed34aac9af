"""Captured sequences as batches: shuffled by seed and epoch, one shard in memory at a time.

A batch is a list of sequences with about so many trained pairs together. The order follows from
(seed, epoch) and the shards alone, so a run that goes on from a checkpoint sees the same batches.
Knows nothing of heads.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from spec_serve.draft.train.capture import Captured, read_shard, shards
from spec_serve.draft.train.unroll import Example


def example_of(captured: Captured, known: Tensor, device: torch.device | str = "cpu") -> Example:
    """A captured sequence as training wants it. known: [V] bool, what the head can propose."""
    return Example(
        tokens=captured.tokens.long().to(device),
        taps=captured.taps.to(device),
        hidden=captured.hidden.to(device),
        known=known[captured.best.long()].to(device),
        first=max(captured.start - 1, 0),
    )


class Corpus:
    """The sequences of a folder of shards that have at least `steps` trained pairs."""

    def __init__(
        self, folder: Path, known: Tensor, steps: int, device: torch.device | str = "cpu"
    ) -> None:
        self.paths = shards(folder)
        if not self.paths:
            raise ValueError(f"{folder}: holds no captured sequences")
        self._known, self._steps, self._device = known, steps, device

    def examples(self, most: int | None = None) -> list[Example]:
        """The first `most` sequences, in the order of the file."""
        found: list[Example] = []
        for path in self.paths:
            for captured in read_shard(path):
                if most is not None and len(found) == most:
                    return found
                if self._fits(captured):
                    found.append(example_of(captured, self._known, self._device))
        return found

    def batches(self, pairs: int, seed: int, epoch: int) -> Iterator[list[Example]]:
        """All sequences once, in batches of about `pairs` trained pairs."""
        chance = random.Random(f"{seed} {epoch}")
        paths = list(self.paths)
        chance.shuffle(paths)
        batch: list[Example] = []
        size = 0
        for path in paths:
            held = [captured for captured in read_shard(path) if self._fits(captured)]
            chance.shuffle(held)
            for captured in held:
                example = example_of(captured, self._known, self._device)
                batch.append(example)
                size += len(example.tokens) - 2 - example.first
                if size >= pairs:
                    yield batch
                    batch, size = [], 0
        if batch:
            yield batch

    def _fits(self, captured: Captured) -> bool:
        return len(captured.tokens) - 2 - max(captured.start - 1, 0) >= self._steps
