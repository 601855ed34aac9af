"""The reduced vocabulary of a head: the ids it can propose, and the tables d2t and t2d of its file.

Ids are chosen by how often they occur; what is left over after the counted ones is filled with the
smallest ids, as byte-level tokenizers number their tokens by how early they were merged. A token
outside can never be guessed, which costs acceptance and nothing else.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor


def choose(
    weighed: Iterable[tuple[Sequence[int], int]], size: int, vocabulary: int, always: Sequence[int]
) -> Tensor:
    """The `size` ids a head may propose, ascending, int64 [size].

    weighed: token sequences and how much each occurrence counts. always: ids that must be among
    them (ends of answers). ValueError if size is no part of the vocabulary.
    """
    if not len(set(always)) <= size <= vocabulary:
        raise ValueError(f"draft-vocab: must be between 1 and {vocabulary}, got {size}")
    counts: Counter[int] = Counter()
    for tokens, weight in weighed:
        for token in tokens:
            counts[token] += weight
    wanted = dict.fromkeys(always)
    for token, _ in sorted(counts.items(), key=lambda entry: (-entry[1], entry[0])):
        if len(wanted) == size:
            break
        wanted[token] = None
    for token in range(vocabulary):
        if len(wanted) == size:
            break
        wanted[token] = None
    return torch.tensor(sorted(wanted), dtype=torch.int64)


def offsets(kept: Tensor) -> Tensor:
    """d2t of the ids `kept` [D]: what is added to a draft id to get the target's."""
    return kept - torch.arange(len(kept))


def membership(kept: Tensor, vocabulary: int) -> Tensor:
    """t2d of the ids `kept`: [V] bool, whether the head knows the id."""
    known = torch.zeros(vocabulary, dtype=torch.bool)
    known[kept] = True
    return known
