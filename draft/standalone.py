"""A smaller language model as drafter, and the check that its token ids mean the target's strings.

Its K/V lie in the target's slots. It reads nothing of the target, so tokens it was not shown can be
caught up later from their ids alone. It knows nothing of how its guesses are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch
from spec_serve.cache.pool import KVSpec, LayerKV
from spec_serve.draft.base import Noise, Plan, Seen, Trees
from spec_serve.draft.grow import grow
from spec_serve.kernels.base import AttentionBackend
from spec_serve.target.model import Model


class Vocabulary(Protocol):
    """What the check needs of a tokenizer."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def unused_ids(self) -> frozenset[int]: ...
    def token_bytes(self, token_id: int) -> bytes: ...
    def is_special(self, token_id: int) -> bool: ...


class VocabularyMismatch(ValueError):
    """Target and draft disagree about what some token ids mean."""


def common_vocabulary(target: Vocabulary, draft: Vocabulary) -> int:
    """How many leading ids target and draft share; ids from there on must never be drafted.

    Compares the bytes and the special flag of every id that is real (not padding) in both. Raises
    VocabularyMismatch with the first three ids that differ.
    """
    common = min(target.vocab_size, draft.vocab_size)
    skip = target.unused_ids | draft.unused_ids
    wrong = [
        i
        for i in range(common)
        if i not in skip
        and (
            target.token_bytes(i) != draft.token_bytes(i)
            or target.is_special(i) != draft.is_special(i)
        )
    ]
    if wrong:
        shown = ", ".join(
            f"{i}: {target.token_bytes(i)!r} / {draft.token_bytes(i)!r}" for i in wrong[:3]
        )
        raise VocabularyMismatch(
            f"draft: its vocabulary differs from the target's at {len(wrong)} of {common} ids"
            f" (target / draft: {shown}); a stand-alone draft must share the target's tokenizer"
        )
    return min(common, real_vocabulary(target), real_vocabulary(draft))


def real_vocabulary(tokenizer: Vocabulary) -> int:
    """One more than the highest id that is a real token: what follows is padding."""
    size, unused = tokenizer.vocab_size, tokenizer.unused_ids
    while size and size - 1 in unused:
        size -= 1
    return size


class StandaloneDrafter:
    """Drafts with `model`; only ids below `vocabulary` are ever proposed."""

    taps: tuple[int, ...] = ()

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        vocabulary: int | None = None,
        name: str = "standalone",
    ) -> None:
        self.name = name
        self.model = model
        self.kv_specs: tuple[KVSpec, ...] = tuple(model.kv_specs)
        self._attention = attention
        self._vocabulary = model.config.vocab if vocabulary is None else vocabulary
        self._layers: Sequence[LayerKV] = ()
        self._table: Tensor = torch.zeros(0, 0, dtype=torch.int64)

    def bind(self, layers: Sequence[LayerKV], table: Tensor) -> None:
        """The pool's tensors of this drafter's layers and its table."""
        self._layers, self._table = layers, table

    def _forward(self, batch: TreeBatch, state: Tensor | None = None) -> tuple[Tensor, None]:
        # A target id the draft's embedding lacks is fed as id 0: it costs acceptance only.
        inside = torch.where(batch.tokens < self.model.config.vocab, batch.tokens, 0)
        batch = replace(batch, tokens=inside)
        plan = self._attention.plan(batch, self._table)
        logits = self.model.forward(batch, self._layers, plan).logits
        if logits.shape[-1] > self._vocabulary:
            logits = logits[:, : self._vocabulary]
        return logits, None

    def propose(self, seen: Seen, grants: Tensor, plan: Plan, noise: Noise) -> Trees | None:
        """See draft/base.py."""
        logits, _ = self._forward(seen.batch)
        if plan.nodes == 0:
            return None
        return grow(logits, None, seen, grants, plan, noise, self._forward)
