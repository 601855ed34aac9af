"""The fixed tensors that graphs of steps read: batch and sampling, padded to a tier's size.

All that tiers of as many rows take in lies in one int64 buffer on the device, of which those with
fewer nodes read the beginnings, and comes there by one copy. A
batch smaller than its tier leaves rows without nodes; nodes left over form a chain in a last row of
their own, write their K/V to TRASH and their slots to the table's column that forgets. What is left
of the tensors without padding is a batch like any other. Knows jobs by their twigs and states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spec_serve.cache.batch import TreeBatch, Twig, build_batch
from spec_serve.cache.pool import TRASH
from spec_serve.kernels.graphs import staging
from spec_serve.spec.choice import RowSampling

_I64 = npt.NDArray[np.int64]

MOST = 256
"""Nodes of the largest tier: beyond, launches cost little beside what they do."""

PER_ROW = (1, 2, 4, 8, 16, 32)
"""Average nodes of a row for which there are tiers."""

_PER_NODE = ("tokens", "positions", "parents", "slots", "row_of", "given", "logit_of")
_PER_ROW = ("row_ids", "prefix", "chain")


@dataclass(frozen=True, slots=True)
class Tier:
    """What a graph is made for: up to `rows` rows and `nodes` nodes in all of them together."""

    rows: int
    nodes: int

    def holds(self, rows: int, nodes: int) -> bool:
        """Whether a batch of this size fits."""
        return rows <= self.rows and nodes <= self.nodes


@dataclass(frozen=True, slots=True)
class Size:
    """What a batch has without padding."""

    rows: int
    nodes: int
    logits: int


def tiers(max_rows: int, max_nodes: int) -> list[Tier]:
    """Tiers for up to max_rows rows of 1 + max_nodes nodes each, small ones first."""
    counts, rows = [], 1
    while rows < max_rows:
        counts.append(rows)
        rows *= 2
    counts.append(max_rows)
    per_row = [n for n in PER_ROW if n <= max_nodes] + [max_nodes + 1]
    return [
        Tier(count, count * n)
        for count in counts
        for n in dict.fromkeys(per_row)
        if count * n <= max(MOST, count)
    ]


def pick(among: Sequence[Tier], rows: int, nodes: int) -> Tier | None:
    """The least of `among`, which ascend, that holds a batch; None = it is too large."""
    return next((tier for tier in among if tier.holds(rows, nodes)), None)


class Block:
    """Named int64 tensors in one buffer, on the device and staged on the host.

    at: the tensors on the device. host: arrays that `send` brings there, all at once.
    """

    def __init__(self, sizes: Mapping[str, int], device: torch.device) -> None:
        total = sum(sizes.values())
        self._staged = staging(total, device)
        self._sent = torch.zeros(total, dtype=torch.int64, device=device)
        ends = list(accumulate(sizes.values(), initial=0))
        spans = dict(zip(sizes, pairwise(ends), strict=True))
        whole = self._staged.numpy()
        self.at = {name: self._sent[a:b] for name, (a, b) in spans.items()}
        self.host: dict[str, _I64] = {name: whole[a:b] for name, (a, b) in spans.items()}
        self._whole = whole
        self._idle = whole.copy()

    def keep(self) -> None:
        """What is staged now is what `reset` returns to."""
        self._idle = self._whole.copy()

    def reset(self) -> None:
        """Stage the padding again."""
        np.copyto(self._whole, self._idle)

    def send(self) -> None:
        """Bring what is staged to the device; the host does not wait."""
        self._sent.copy_(self._staged, non_blocking=True)


class Padded:
    """Views of a frame's tensors as a tier reads them.

    batch: of `nodes` nodes and as many logit rows; its last row is padding. temperature, seeds,
    drawn: [N] of each logit row. replayed: [N].
    """

    def __init__(self, at: Mapping[str, Tensor], nodes: int, words: int) -> None:
        self.batch = TreeBatch(
            **{name: at[name][:nodes] for name in (*_PER_NODE, "logits_at")},
            **{name: at[name] for name in (*_PER_ROW, "node_ptr")},
            ancestors=at["ancestors"].view(-1, words)[:nodes],
            twig_ptr=at["node_ptr"],
            twig_slots=at["slots"][:nodes],
        )
        self.temperature = at["temperature"].view(torch.float64)[:nodes]
        self.seeds, self.drawn = at["seeds"][:nodes], at["drawn"][:nodes]
        self.replayed = at["replayed"][:nodes]


class Frame:
    """The inputs of all tiers of `rows` rows, with up to `nodes` nodes.

    words: of ancestor bits. forget: the table's column that swallows writes. depth: guesses of a
    path. told: [rows + 1, 3 + depth] what graphs leave of a verdict: bonus, accepted, leaf, path.
    """

    def __init__(
        self, rows: int, nodes: int, words: int, depth: int, forget: int, device: torch.device
    ) -> None:
        lines = rows + 1
        sizes = dict.fromkeys((*_PER_NODE, "logits_at"), nodes)
        sizes |= {"node_ptr": lines + 1} | dict.fromkeys(_PER_ROW, lines)
        sizes |= {"ancestors": nodes * words, "next_slots": lines}
        sizes |= dict.fromkeys(("temperature", "seeds", "drawn", "replayed"), nodes)
        self.rows, self.words, self.depth = rows, words, depth
        self._block = block = Block(sizes, device)
        host = block.host
        host["positions"][:] = forget
        host["parents"][:] = host["logit_of"][:] = -1
        host["given"][:] = host["chain"][:] = 1
        host["row_of"][:] = rows
        host["slots"][:] = host["next_slots"][:] = TRASH
        block.keep()
        block.send()
        self.whole = Padded(block.at, nodes, words)
        self.next_slots = block.at["next_slots"]
        self.told = torch.zeros((lines, 3 + depth), dtype=torch.int64, device=device)

    def padded(self, nodes: int) -> Padded:
        """What the tier of so many nodes reads."""
        return Padded(self._block.at, nodes, self.words)

    def idle(self, nodes: int) -> None:
        """Nothing but padding in the tier of so many nodes, as graphs are recorded."""
        self._block.reset()
        self._block.host["node_ptr"][-1] = nodes
        self._block.host["logits_at"][:] = nodes - 1
        self._block.send()

    def fill(
        self, most: int, twigs: Sequence[Twig], next_slots: Sequence[int], replays: Sequence[int],
        states: Sequence[RowSampling],
    ) -> Size | None:  # fmt: skip
        """Bring a step's batch to the device, padded to `most` nodes; None if its trees need more
        words of ancestors than there are."""
        made = build_batch(twigs)
        rows, nodes, logits = made.rows, len(made), len(made.logits_at)
        words = made.ancestors.shape[1]
        if words > self.words:
            return None
        block = self._block
        block.reset()
        host = block.host
        for name in _PER_NODE:
            host[name][:nodes] = getattr(made, name).numpy()
        for name in _PER_ROW:
            host[name][:rows] = getattr(made, name).numpy()
        host["node_ptr"][: rows + 1] = made.node_ptr.numpy()
        host["node_ptr"][rows + 1 : -1] = nodes
        host["node_ptr"][-1] = most
        host["logits_at"][:logits] = made.logits_at.numpy()
        host["logits_at"][logits:] = most - 1
        bits = host["ancestors"].reshape(-1, self.words)
        bits[:nodes, :words] = made.ancestors.numpy()
        host["next_slots"][:rows] = next_slots
        if replays:
            host["replayed"][list(replays)] = 1
        if any(state.sampled for state in states):
            at = host["logits_at"][:logits]
            row = host["row_of"][at]
            warm = np.array([state.temperature for state in states])
            host["temperature"][:logits] = warm[row].view(np.int64)
            host["seeds"][:logits] = np.array([state.seed for state in states])[row]
            host["drawn"][:logits] = host["positions"][at] + 1
        block.send()
        return Size(rows, nodes, logits)

    def cut(self, size: Size) -> TreeBatch:
        """The batch without padding, as views."""
        whole, rows, nodes = self.whole.batch, size.rows, size.nodes
        return TreeBatch(
            **{name: getattr(whole, name)[:nodes] for name in _PER_NODE},
            **{name: getattr(whole, name)[:rows] for name in _PER_ROW},
            logits_at=whole.logits_at[: size.logits],
            node_ptr=whole.node_ptr[: rows + 1],
            twig_ptr=whole.node_ptr[: rows + 1],
            ancestors=whole.ancestors[:nodes],
            twig_slots=whole.slots[:nodes],
        )


def plainly_drawn(states: Sequence[RowSampling]) -> bool:
    """Whether temperature and seed are all that these rows' choices depend on."""
    return not any(
        state.filtered
        or state.penalised
        or state.masks
        or state.emitted < state.min_tokens
        or state.sampling.bad_words
        or len(state.bias_ids)
        or len(state.unused_ids)
        for state in states
    )
