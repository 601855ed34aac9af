"""What a kind of head is taught and measured by: the loop and the run ask no more of it.

EAGLE-3 heads unroll their own steps (unroll.py), block drafters answer blocks that begin at random
places (block.py). Both are measured by chains drafted from every place of held-out answers. Knows
the kinds; no optimiser, no files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from spec_serve.draft.train.acceptance import Acceptance, chain_lengths, tally
from spec_serve.draft.train.block import BlockHead, block_lengths, learn
from spec_serve.draft.train.head import EagleHead
from spec_serve.draft.train.named import NamedWeights
from spec_serve.draft.train.unroll import Example, Teacher, Unrolled, unroll


class Lesson(Protocol):
    """A head with what it is taught."""

    @property
    def head(self) -> NamedWeights: ...

    def __call__(self, examples: Sequence[Example], salt: int) -> Unrolled:
        """Losses of a batch; what is random in it follows from the salt."""
        ...

    def lengths(self, example: Example, depth: int) -> Tensor:
        """Right guesses in a row from each trained place, [Q] int64."""
        ...


@dataclass(frozen=True, slots=True)
class EagleLesson:
    """Training-time test. embedding: the target's [V, H]. kept: [D] ids of the head."""

    head: EagleHead
    embedding: Tensor
    teacher: Teacher
    kept: Tensor
    steps: int

    def __call__(self, examples: Sequence[Example], salt: int) -> Unrolled:
        """See Lesson."""
        return unroll(self.head, self.embedding, self.teacher, examples, self.steps, salt)

    def lengths(self, example: Example, depth: int) -> Tensor:
        """See Lesson."""
        return chain_lengths(self.head, self.embedding, self.kept, example, depth)


@dataclass(frozen=True, slots=True)
class BlockLesson:
    """Blocks from random places. embedding: the target's [V, H]. kept: [D] ids of the head."""

    head: BlockHead
    embedding: Tensor
    teacher: Teacher
    kept: Tensor
    seed: int

    def __call__(self, examples: Sequence[Example], salt: int) -> Unrolled:
        """See Lesson."""
        chance = torch.Generator().manual_seed(self.seed * 1_000_033 + salt)
        return learn(self.head, self.embedding, self.teacher, examples, chance, salt)

    def lengths(self, example: Example, depth: int) -> Tensor:
        """See Lesson."""
        return block_lengths(self.head, self.embedding, self.kept, example, depth)


def acceptance(lesson: Lesson, examples: Sequence[Example], depth: int) -> Acceptance:
    """Over all answers, `depth` guesses a step."""
    with torch.no_grad():
        return tally((lesson.lengths(example, depth).tolist() for example in examples), depth)
