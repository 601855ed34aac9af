"""What one choice's sampling depends on: settings, what was emitted, token counts.

Host state, kept up to date token by token and never rebuilt. It answers what holds at a node of a
tree, given the guesses above it. Knows nothing of tensors, devices or batches (nodes.py packs it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from spec_serve.spec.request import Sampling

_I64 = npt.NDArray[np.int64]
_F64 = npt.NDArray[np.float64]


class RowSampling:
    """Sampling state of one choice: settings, what was emitted, token counts for the penalties.

    seed: any integer; its low 64 bits count. vocab: number of token ids. min_tokens: `end_ids` are
    excluded before this many tokens exist. unused_ids: ids that must never be chosen (holes in the
    vocabulary; a padded end is cheaper cut off by a view of the logits). `plain` is True when the
    arg-max of the raw logits is the answer, at any node from here on.
    """

    def __init__(
        self,
        sampling: Sampling,
        seed: int,
        vocab: int,
        prompt: Sequence[int],
        min_tokens: int,
        end_ids: frozenset[int],
        unused_ids: Sequence[int] = (),
    ) -> None:
        self.sampling = sampling
        self.seed = (seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self.vocab = vocab
        self.emitted = 0
        self.min_tokens = min_tokens if end_ids else 0
        self.end_ids = sorted(end_ids)
        self.unused_ids = np.array(unused_ids, dtype=np.int64)
        bias = sampling.logit_bias
        self.bias_ids = np.fromiter(bias.keys(), np.int64, len(bias))
        self.bias = np.fromiter(bias.values(), np.float64, len(bias))
        self.sampled = sampling.temperature > 0
        # Neither zero nor infinite in float32; what lies beyond can't be told from these.
        self.temperature = min(max(sampling.temperature, 1e-30), 1e30) if self.sampled else 0.0
        self.filtered = self.sampled and (
            0 < sampling.top_k < vocab or sampling.top_p < 1 or sampling.min_p > 0
        )
        self.penalised = (
            sampling.repetition_penalty != 1
            or sampling.frequency_penalty != 0
            or sampling.presence_penalty != 0
        )
        # Bad words by the last token of what has to stand before their final token.
        self.banned = [word[0] for word in sampling.bad_words if len(word) == 1]
        self.bans: dict[int, list[tuple[tuple[int, ...], int]]] = {}
        for word in sampling.bad_words:
            if len(word) > 1:
                self.bans.setdefault(word[-2], []).append((word[:-1], word[-1]))
        self._reach = max((len(word) - 1 for word in sampling.bad_words), default=0)
        self.tail = list(prompt[len(prompt) - self._reach :]) if self._reach else []
        # Tokens the penalties touch: growing arrays, and where each token stands in them. A count
        # of 0 marks a prompt token that was never emitted (repetition only).
        self._place: dict[int, int] = {}
        self._ids = np.empty(64, dtype=np.int64)
        self._counts = np.empty(64, dtype=np.float64)
        if sampling.repetition_penalty != 1:
            self._count(prompt, 0.0)
        # Per node of the tree from the last given one on, bits of the ids allowed behind it.
        self.masks: Sequence[npt.NDArray[np.uint64] | None] = ()
        # Nodes, counted alike, whose token is known without logits.
        self.forced: Mapping[int, int] = {}
        self._simple = not (
            self.sampled or self.penalised or bias or sampling.bad_words or len(self.unused_ids)
        )

    @property
    def plain(self) -> bool:
        return self._simple and self.emitted >= self.min_tokens and not self.masks

    @property
    def follows_path(self) -> bool:
        """Whether the guesses above a node change its distribution (min_tokens aside)."""
        return self.penalised or bool(self.bans)

    def extend(self, tokens: Sequence[int]) -> None:
        """These tokens were emitted, in order."""
        self.emitted += len(tokens)
        if self.penalised:
            self._count(tokens, 1.0)
        if self._reach:
            self.tail = (self.tail + list(tokens))[-self._reach :]

    def table(self) -> tuple[_I64, _F64]:
        """Ids the penalties touch and how often each was emitted."""
        used = len(self._place)
        return self._ids[:used], self._counts[:used]

    def counts_along(self, path: Sequence[int]) -> dict[int, float]:
        """Counts of the tokens of `path` (guesses), what was emitted included."""
        counts: dict[int, float] = {}
        for token in path:
            count = counts.get(token)
            if count is None:
                place = self._place.get(token)
                count = 0.0 if place is None else float(self._counts[place])
            counts[token] = count + 1.0
        return counts

    def banned_after(self, path: Sequence[int]) -> list[int]:
        """Tokens that would complete a bad word behind what was emitted and `path`."""
        if not self.bans:
            return self.banned
        context = (self.tail + list(path))[-self._reach :]
        found = self.bans.get(context[-1], ()) if context else ()
        hits = [last for head, last in found if tuple(context[-len(head) :]) == head]
        return self.banned + hits

    def _count(self, tokens: Iterable[int], by: float) -> None:
        for token in tokens:
            place = self._place.get(token)
            if place is None:
                place = self._place[token] = len(self._place)
                if place == len(self._ids):
                    self._ids = np.resize(self._ids, 2 * place)
                    self._counts = np.resize(self._counts, 2 * place)
                self._ids[place] = token
                self._counts[place] = 0.0
            self._counts[place] += by
