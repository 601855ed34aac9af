"""Drafters of heads that read hidden states: certain pairs into the cache, then a tree grown.

A pair lies in the slot of its token, with the feature of the position before it, so draft K/V
depend on nothing that comes later and a cache hit can use them. Position 0 has no pair. Equations
are draft/head.py's, growth draft/grow.py's; how guesses are verified isn't known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.grow import grow
from spec_serve.draft.head import FeatureHead
from spec_serve.kernels.base import AttentionBackend, AttentionPlan

PAIRED_FROM = 1
"""First position with a pair; what lies before it is never looked at."""


def paired(seen: Seen, first: int = PAIRED_FROM) -> Seen:
    """`seen` without nodes of positions before `first`, which have no pair.

    A row's newest token stays in any case. With `first` = 1 the batch is looked at on the host only
    if a row begins in it.
    """
    if first == PAIRED_FROM and not seen.begins:
        return seen
    batch = seen.batch
    keep = batch.positions >= first
    keep[seen.last] = True
    if bool(keep.all()):
        return seen
    count = keep.long()
    before = count.cumsum(0) - count  # [N] new number of each node
    node_ptr = torch.cat((before, count.sum().view(1)))[batch.node_ptr]
    cut = replace(
        batch,
        tokens=batch.tokens[keep],
        positions=batch.positions[keep],
        slots=batch.slots[keep],
        row_of=batch.row_of[keep],
        given=batch.given[keep],
        parents=batch.parents[keep],
        ancestors=batch.ancestors[keep],
        logit_of=batch.logit_of[keep],
        logits_at=before[batch.logits_at],
        node_ptr=node_ptr,
        twig_ptr=node_ptr,
        twig_slots=batch.slots[keep],
        prefix=batch.prefix.clamp_min(first),
    )
    taps = None if seen.taps is None else seen.taps[keep]
    return replace(seen, batch=cut, last=before[seen.last], taps=taps, begins=False)


class FeatureDrafter:
    """Drafts with a head that reads `taps`."""

    def __init__(
        self, head: FeatureHead, attention: AttentionBackend, name: str | None = None
    ) -> None:
        self.name = name or head.config.format
        self.head = head
        self.config = head.config
        self.kv_specs: tuple[KVSpec, ...] = head.kv_specs
        self.taps: tuple[int, ...] = head.config.taps
        self._attention = attention
        self._layers: Sequence[LayerKV] = ()
        self._table: Tensor = torch.zeros(0, 0, dtype=torch.int64)

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """The pool's tensors of this drafter's layers and its table."""
        self._layers, self._table = layers, table

    def _run(
        self, batch: TreeBatch, feature: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        plan = self._attention.plan(batch, self._table, PAIRED_FROM)
        return self.head.run(batch, feature, self._layers, plan, wanted)

    def _note(self, batch: TreeBatch, feature: Tensor) -> None:
        """The K/V of certain pairs, where no guess is wanted."""

        def plan() -> AttentionPlan:
            return self._attention.plan(batch, self._table, PAIRED_FROM)

        self.head.note(batch, feature, self._layers, plan)

    def _forward(self, batch: TreeBatch, state: Tensor | None) -> tuple[Tensor, Tensor]:
        assert state is not None
        hidden, fed = self._run(batch, state)
        return self.head.logits(hidden), fed

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py."""
        assert seen.taps is not None, "the engine gives a drafter the taps it asks for"
        seen = paired(seen)
        assert seen.taps is not None
        feature = self.head.feature(seen.taps)
        if plan.nodes == 0:
            self._note(seen.batch, feature)
            return None
        hidden, fed = self._run(seen.batch, feature, seen.last)
        logits = self.head.logits(hidden)
        return grow(logits, fed, seen, grants, plan, noise, self._forward, self.head.ids)
