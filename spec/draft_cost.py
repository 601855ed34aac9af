"""What a drafter that reads the target's layers costs: its pass over n pairs, timed at start.

Measured before any request, on slots nobody holds. Knows the drafter's interface and a clock; what
follows from the figures is draft/budget.py's business.
"""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import torch
from torch import Tensor

from spec_serve.cache.batch import Twig, build_batch
from spec_serve.cache.pool import KVPool
from spec_serve.cache.tree import chain
from spec_serve.draft.base import Drafter, Plan, Seen, scratch_slots

WHOLE = Plan(1, 1, 1)
"""The smallest plan: the pass over what is certain, and one guess."""


class Still:
    """No noise, no temperature."""

    def add(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        """See draft/base.py."""
        return logits


def _propose(drafter: Drafter, pool: KVPool, width: int, n: int) -> float:
    """Milliseconds of one guess behind n pairs of features `width` wide."""
    scratch = max(1, scratch_slots(drafter, WHOLE))
    # Pairs that differ, as a mixture of experts would send equal ones to the same few.
    batch = build_batch([Twig(0, 1, chain(range(1, n + 1)), range(2, n + 2), n)], pool.device)
    last = torch.tensor([n - 1], device=pool.device)
    taps = torch.randn(n, width, generator=torch.Generator().manual_seed(0)).to(pool.device)
    seen = Seen(batch, last, last + 2, taps, False)
    grants = torch.arange(n + 2, n + 2 + scratch, device=pool.device).unsqueeze(0)
    begun = perf_counter()
    trees = drafter.propose(seen, grants, WHOLE, Still())
    if trees is not None:
        trees.tokens.tolist()  # waits for the device
    return (perf_counter() - begun) * 1e3


@torch.inference_mode()
def drafter_points(
    drafter: Drafter, pool: KVPool, width: int, sizes: Sequence[int]
) -> list[tuple[int, float]]:
    """(n, milliseconds) for each n of `sizes` that fits, ascending, the quickest of several.

    width: the target's hidden size. The drafter is bound to `pool`, whose first slots hold nothing.
    """
    room = min(pool.slots, pool.table.shape[1] - 1)
    scratch = max(1, scratch_slots(drafter, WHOLE))
    points: list[tuple[int, float]] = []
    for n in sizes:
        if n + 2 + scratch > room:
            break
        times = [_propose(drafter, pool, width * len(drafter.taps), n) for _ in range(4)]
        points.append((n, max(min(times[1:]), points[-1][1] if points else 0.0)))
    return points
