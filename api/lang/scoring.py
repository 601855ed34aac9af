"""`select`: which of several texts a model finds likeliest behind what is there.

Every choice is encoded in its place, together with what stands before it, and scored from the first
token on that differs: all of them as one tree, in one pass of the target. Knows no states.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

from spec_serve.lang.backend import Backend
from spec_serve.lang.parts import ProgramError, Select


def common(lists: Sequence[Sequence[int]]) -> int:
    """Length of the longest beginning that all share."""
    shortest = min(map(len, lists))
    first = lists[0]
    for at in range(shortest):
        if any(ids[at] != first[at] for ids in lists):
            return at
    return shortest


async def scored(backend: Backend, prompts: list[list[int]], start: int) -> list[list[float]]:
    """Each prompt's log-probabilities from `start` on, which is where they part.

    Raises ProgramError where they have no beginning in common.
    """
    if start == 0:
        raise ProgramError("there is nothing to choose behind: write some text first")
    tails = [ids[start:] for ids in prompts]
    wanted = [tail for tail in tails if tail]
    if not wanted:
        return [[] for _ in prompts]
    found = iter(await backend.score(prompts[0][:start], wanted))
    return [next(found) if tail else [] for tail in tails]


def best(select: Select, tokens: list[list[int]], scores: list[list[float]]) -> int:
    """The number of the choice. tokens: of each choice from where they part; scores: likewise."""
    sums = [sum(found) for found in scores]
    if select.rule == "sum":
        return max(range(len(sums)), key=sums.__getitem__)
    if select.rule == "mean":
        means = [sum(found) / max(1, len(found)) for found in scores]
        return max(range(len(means)), key=means.__getitem__)
    if select.rule == "sample":
        top = max(sums)
        weights = [math.exp((one - top) / select.temperature) for one in sums]
        return random.Random(select.seed).choices(range(len(sums)), weights)[0]
    left = list(range(len(tokens)))
    depth = 0
    while len(left) > 1:
        going = [i for i in left if len(tokens[i]) > depth]
        if not going:
            break
        lead = max(going, key=lambda i: scores[i][depth])
        left = [i for i in going if tokens[i][depth] == tokens[lead][depth]]
        depth += 1
    return left[0]
