"""A step's sampling, packed: what each logit row needs beyond a plain arg-max.

`pack` looks at every row's state along the paths of its tree and gathers seeds, settings, counts
and masks into one buffer, so that a device receives them by one copy. Rows are grouped by what has
to be done, so that nobody pays for a neighbour's features. Knows nothing of logits (sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spec_serve.cache.tree import TokenTree
from spec_serve.spec.choice import RowSampling

_I64 = npt.NDArray[np.int64]
_F64 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Spans:
    """Work rows that each need a stretch of a table shared by the nodes of their row.

    rows, start, length: [Q]. ids, values: [T] the tables. total: sum of the lengths, known to the
    host, so that expanding needs nothing from the device.
    """

    rows: Tensor
    start: Tensor
    length: Tensor
    ids: Tensor
    values: Tensor
    total: int

    def expand(self) -> tuple[Tensor, Tensor]:
        """Index among the Q and index into the tables, per entry: two [total] tensors."""
        order = torch.arange(len(self.rows), device=self.rows.device)
        which = torch.repeat_interleave(order, self.length, output_size=self.total)
        shift = self.start - (self.length.cumsum(0) - self.length)
        return which, torch.arange(self.total, device=which.device) + shift[which]


@dataclass(frozen=True, slots=True)
class NodeSampling:
    """What M logit rows need beyond a plain arg-max; everything on the device of the logits.

    K rows need work. In work order: `greedy` rows at T = 0, then `free` sampled rows, then rows
    with top_k, top_p or min_p. U distinct (seed, position) keys are shared by siblings and cousins.
    work: [K] logit row of each, None = all rows in their own order.
    key_of: [S] key of each sampled row (S = K - greedy), None = one key each, in order; the free
    rows' keys are the first `free_keys`.
    top_k (0 = off), top_p, min_p: of the F filtered rows. widest: the bound of top_k over them,
    0 when one of them has none.
    """

    greedy: int
    free: int
    free_keys: int
    work: Tensor | None
    temperature: Tensor  # [S] float64
    key_seed: Tensor  # [U]
    key_position: Tensor  # [U] position of the token to be drawn
    key_of: Tensor | None
    top_k: Tensor  # [F]
    top_p: Tensor  # [F] float64
    min_p: Tensor  # [F] float64
    widest: int
    penalties: Spans | None  # values: times emitted
    penalty: Tensor  # [Q, 3] float64 repetition, frequency, presence of the penalised rows
    path: tuple[Tensor, Tensor, Tensor] | None  # index among the Q, token id, times emitted [E]
    bias: Spans | None
    unused: Spans | None
    bad: tuple[Tensor, Tensor] | None  # work row, token id
    end: tuple[Tensor, Tensor] | None  # work row, token id

    @property
    def edits(self) -> bool:
        """Whether some logits change before temperature and filters."""
        parts = (self.penalties, self.bias, self.unused, self.bad, self.end)
        return any(part is not None for part in parts)


class _Table:
    """Collects the stretches of `Spans` on the host; each row's own table is stored once."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.start: list[int] = []
        self.length: list[int] = []
        self.ids: list[_I64] = []
        self.values: list[_F64] = []
        self._known: dict[int, int] = {}
        self._used = 0

    def add(self, row: int, owner: int, ids: _I64, values: _F64) -> None:
        start = self._known.get(owner)
        if start is None:
            start = self._known[owner] = self._used
            self.ids.append(ids)
            self.values.append(values)
            self._used += len(ids)
        self.rows.append(row)
        self.start.append(start)
        self.length.append(len(ids))


class Buffer:
    """Gathers integer and float arrays, so that one copy brings them to the device."""

    def __init__(self) -> None:
        self._parts: list[_I64] = []
        self._sizes: list[int] = []

    def ints(self, values: Sequence[int] | _I64) -> int:
        self._parts.append(np.asarray(values, dtype=np.int64))
        self._sizes.append(len(values))
        return len(self._sizes) - 1

    def floats(self, values: Sequence[float] | _F64) -> int:
        return self.ints(np.asarray(values, dtype=np.float64).view(np.int64))

    def send(self, device: torch.device) -> list[Tensor]:
        packed = torch.from_numpy(np.concatenate(self._parts))
        if device.type != "cpu":
            packed = packed.pin_memory().to(device, non_blocking=True)
        return list(packed.split_with_sizes(self._sizes))


_Entry = tuple[int, RowSampling, int, int, Sequence[int]]


def _judged(
    rows: Sequence[tuple[RowSampling, TokenTree, int, int]],
) -> tuple[list[_Entry], list[_Entry], list[_Entry], int]:
    """The logit rows that need work, by group, as (logit row, state, position of the token to be
    drawn, guesses above, path of guesses), and the number of all logit rows.

    Nodes above the last given one are never drawn from: what follows them is known.
    """
    groups: tuple[list[_Entry], list[_Entry], list[_Entry]] = ([], [], [])
    count = 0
    for state, tree, position, logits_from in rows:
        n, last = len(tree.tokens), tree.given - 1
        first, count = count - logits_from, count + max(0, n - logits_from)
        if logits_from >= n or state.plain:
            continue
        into = groups[0 if not state.sampled else 2 if state.filtered else 1]
        if n == tree.given:
            into.append((first + last, state, position + n, 0, ()))
            continue
        depths = range(n) if tree.is_chain else tree.depths()
        paths: dict[int, tuple[int, ...]] = {last: ()}
        for node in range(last, n):
            if state.follows_path and node > last:
                paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
            if node >= logits_from:
                depth = depths[node]
                path = paths.get(node, ())
                into.append((first + node, state, position + depth + 1, depth - last, path))
    return *groups, count


def pack(
    rows: Sequence[tuple[RowSampling, TokenTree, int, int]], device: torch.device | str
) -> NodeSampling | None:
    """What the logit rows of a step need, or None when the raw arg-max answers all of them.

    rows: per row of the batch, in order, (state, tree, position of node 0, first node with logits;
    it and all later ones have logits). Guesses on the path above a node count as if emitted.
    """
    greedy, free, filtered, count = _judged(rows)
    entries = greedy + free + filtered
    if not entries:
        return None
    keys: dict[tuple[int, int], int] = {}
    key_of: list[int] = []
    free_keys = 0
    temperature: list[float] = []
    penalties, bias, unused = _Table(), _Table(), _Table()
    penalty: list[float] = []
    path_edits: tuple[list[int], list[int], list[float]] = ([], [], [])
    bad: tuple[list[int], list[int]] = ([], [])
    end: tuple[list[int], list[int]] = ([], [])
    for i, (_, state, position, ahead, path) in enumerate(entries):
        sampling, owner = state.sampling, id(state)
        if state.sampled:
            key_of.append(keys.setdefault((state.seed, position), len(keys)))
            if not state.filtered:
                free_keys = len(keys)
            temperature.append(state.temperature)
        if state.emitted + ahead < state.min_tokens:
            end[0].extend([i] * len(state.end_ids))
            end[1].extend(state.end_ids)
        if state.penalised:
            for token, times in state.counts_along(path).items():
                path_edits[0].append(len(penalties.rows))
                path_edits[1].append(token)
                path_edits[2].append(times)
            penalties.add(i, owner, *state.table())
            penalty += (
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        if len(state.bias_ids):
            bias.add(i, owner, state.bias_ids, state.bias)
        if sampling.bad_words:
            words = state.banned_after(path)
            bad[0].extend([i] * len(words))
            bad[1].extend(words)
        if len(state.unused_ids):
            unused.add(i, owner, state.unused_ids, np.zeros(len(state.unused_ids)))
    work = [entry[0] for entry in entries]
    identity = len(work) == count and all(row == i for i, row in enumerate(work))
    limits = [entry[1].sampling for entry in filtered]
    # Limits beyond the vocabulary are none.
    top_k = [s.top_k if s.top_k < entries[0][1].vocab else 0 for s in limits]

    buffer = Buffer()
    at = {
        "work": buffer.ints(() if identity else work),
        "temperature": buffer.floats(temperature),
        "key_seed": buffer.ints([seed for seed, _ in keys]),
        "key_position": buffer.ints([position for _, position in keys]),
        "key_of": buffer.ints(() if len(keys) == len(key_of) else key_of),
        "top_k": buffer.ints(top_k),
        "top_p": buffer.floats([s.top_p for s in limits]),
        "min_p": buffer.floats([s.min_p for s in limits]),
        "penalty": buffer.floats(penalty),
    }
    pairs = {
        name: [buffer.ints(part) for part in pair] for name, pair in (("bad", bad), ("end", end))
    }
    edits = [buffer.ints(path_edits[0]), buffer.ints(path_edits[1]), buffer.floats(path_edits[2])]
    spans = {
        name: [
            buffer.ints(table.rows),
            buffer.ints(table.start),
            buffer.ints(table.length),
            buffer.ints(np.concatenate(table.ids)),
            buffer.floats(np.concatenate(table.values)),
        ]
        for name, table in (("penalties", penalties), ("bias", bias), ("unused", unused))
        if table.rows
    }
    sent = buffer.send(torch.device(device))

    def real(index: int) -> Tensor:
        return sent[index].view(torch.float64)

    def span(name: str, table: _Table) -> Spans | None:
        if name not in spans:
            return None
        rows, start, length, ids, values = spans[name]
        total = sum(table.length)
        return Spans(sent[rows], sent[start], sent[length], sent[ids], real(values), total)

    def pair(name: str) -> tuple[Tensor, Tensor] | None:
        row, token = pairs[name]
        return (sent[row], sent[token]) if len(sent[row]) else None

    return NodeSampling(
        greedy=len(greedy),
        free=len(free),
        free_keys=free_keys,
        work=None if identity else sent[at["work"]],
        temperature=real(at["temperature"]),
        key_seed=sent[at["key_seed"]],
        key_position=sent[at["key_position"]],
        key_of=None if len(keys) == len(key_of) else sent[at["key_of"]],
        top_k=sent[at["top_k"]],
        top_p=real(at["top_p"]),
        min_p=real(at["min_p"]),
        widest=max(top_k, default=0) if all(top_k) else 0,
        penalties=span("penalties", penalties),
        penalty=real(at["penalty"]).view(-1, 3),
        path=(sent[edits[0]], sent[edits[1]], real(edits[2])) if path_edits[0] else None,
        bias=span("bias", bias),
        unused=span("unused", unused),
        bad=pair("bad"),
        end=pair("end"),
    )
