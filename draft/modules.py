"""Several NEXTN modules, one for each step of a guess: module k reads what module k - 1 made of the
position before.

Module k's pair at a token needs module k - 1's output at the token before it, so outputs are kept
in the slots like K/V, and a cache hit finds them. Beyond the last module that one is used again.
Source: DeepSeek-V3 (arXiv 2412.19437), section 2.2. Equations are draft/head.py's.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.feature import paired
from spec_serve.draft.grow import grow
from spec_serve.draft.head import FeatureHead
from spec_serve.kernels.base import AttentionBackend


class ModulesDrafter:
    """Drafts with heads[0] for the first guess, heads[1] for the second, and so on."""

    def __init__(
        self, heads: Sequence[FeatureHead], attention: AttentionBackend, name: str = "nextn"
    ) -> None:
        first = heads[0]
        assert all(len(head.kv_specs) == 1 for head in heads), "a module is one layer"
        self.name = name
        self.heads = tuple(heads)
        self.config = first.config
        self.taps: tuple[int, ...] = first.config.taps
        self._hidden = first.config.block.hidden
        # Outputs of all modules but the last: two to a layer of the pool, as its K and its V.
        kept = (KVSpec(1, self._hidden, first.dtype),) * (len(heads) // 2)
        own = tuple(spec for head in heads for spec in head.kv_specs)
        self.kv_specs: tuple[KVSpec, ...] = (*own, *kept)
        self._attention = attention
        self._layers: Sequence[LayerKV] = ()
        self._outputs: list[Tensor] = []
        self._table: Tensor = torch.zeros(0, 0, dtype=torch.int64)

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """The pool's tensors of this drafter's layers and its table."""
        count = len(self.heads)
        self._layers, self._table = layers[:count], table
        self._outputs = [half for kv in layers[count:] for half in (kv.k, kv.v)]

    def _run(
        self, k: int, batch: TreeBatch, feature: Tensor, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Module k, counted from 0; the first position it has a pair at is k + 1."""
        plan = self._attention.plan(batch, self._table, k + 1)
        return self.heads[k].run(batch, feature, self._layers[k : k + 1], plan, wanted)

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py."""
        assert seen.taps is not None, "the engine gives a drafter the taps it asks for"
        seen = paired(seen)
        assert seen.taps is not None
        feature = self.heads[0].feature(seen.taps)
        hidden, fed = self._run(0, seen.batch, feature)
        first = hidden[seen.last]
        states = [fed[seen.last]]  # [B, H] of each module at the newest token
        here = seen
        for k in range(1, len(self.heads)):
            kept = self._outputs[k - 1]
            kept.index_copy_(0, here.batch.slots, fed.unsqueeze(1))
            here = paired(here, k + 1)
            batch = here.batch
            # Padding behind the newest token may reach beyond the table.
            position = (batch.positions - 1).clamp_max(self._table.shape[1] - 1)
            before = self._table[batch.row_ids[batch.row_of], position]
            _, fed = self._run(k, batch, kept[before].squeeze(1))
            states.append(fed[here.last])
        if plan.nodes == 0:
            return None
        level = 0

        def forward(batch: TreeBatch, state: Tensor | None) -> tuple[Tensor, Tensor]:
            nonlocal level
            level += 1
            assert state is not None
            parts = list(state.chunk(len(self.heads), -1))
            answer = min(level, len(self.heads) - 1)
            logits: Tensor | None = None
            made = list(parts)
            for k in range(answer, len(self.heads)):
                # The last module, used again, goes on from its own output.
                source = k if level > k else k - 1
                hidden, made[k] = self._run(k, batch, parts[source])
                if k == answer:
                    logits = self.heads[k].logits(hidden)
            assert logits is not None
            return logits, torch.cat(made, -1)

        logits = self.heads[0].logits(first)
        return grow(
            logits, torch.cat(states, -1), seen, grants, plan, noise, forward, self.heads[0].ids
        )
