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
class Edits:
    """How logits change before temperature and filters, on the work rows that need it."""

    penalties: Spans | None  # values: times emitted
    penalty: Tensor  # [Q, 3] float64 repetition, frequency, presence of the penalised rows
    path: tuple[Tensor, Tensor, Tensor] | None  # index among the Q, token id, times emitted [E]
    bias: Spans | None
    unused: Spans | None
    allowed: tuple[Tensor, Tensor] | None  # work row [Q], bits of the ids that may be chosen [Q, W]
    bad: tuple[Tensor, Tensor] | None  # work row, token id
    end: tuple[Tensor, Tensor] | None  # work row, token id


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
    edits: Edits | None


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
        self._at = 0

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

    def queue(self, buffer: Buffer) -> None:
        if self.rows:
            self._at = buffer.ints(self.rows)
            buffer.ints(self.start)
            buffer.ints(self.length)
            buffer.ints(np.concatenate(self.ids))
            buffer.floats(np.concatenate(self.values))

    def spans(self, sent: Sequence[Tensor]) -> Spans | None:
        if not self.rows:
            return None
        rows, start, length, ids, values = sent[self._at : self._at + 5]
        return Spans(rows, start, length, ids, values.view(torch.float64), sum(self.length))


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


def sent(device: torch.device, *lists: Sequence[int]) -> list[Tensor]:
    """Host integers as int64 tensors; on a GPU by one copy that nobody waits for."""
    if device.type == "cpu":
        return [torch.tensor(values, dtype=torch.int64) for values in lists]
    buffer = Buffer()
    for values in lists:
        buffer.ints(values)
    return buffer.send(device)


# Logit row, state, position of the token to be drawn, guesses above, their path, nodes behind the
# last given one.
_Entry = tuple[int, RowSampling, int, int, Sequence[int], int]


class _Edited:
    """Collects `Edits` on the host, entry by entry."""

    def __init__(self) -> None:
        self._penalties, self._bias, self._unused = _Table(), _Table(), _Table()
        self._penalty: list[float] = []
        self._path: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._bad: tuple[list[int], list[int]] = ([], [])
        self._end: tuple[list[int], list[int]] = ([], [])
        self._allowed: tuple[list[int], list[_I64]] = ([], [])
        self._at = 0

    def add(self, i: int, entry: _Entry) -> None:
        """Work row i is this one."""
        _, state, _, ahead, path, node = entry
        sampling, owner = state.sampling, id(state)
        if state.emitted + ahead < state.min_tokens:
            self._end[0].extend([i] * len(state.end_ids))
            self._end[1].extend(state.end_ids)
        if state.penalised:
            for token, times in state.counts_along(path).items():
                self._path[0].append(len(self._penalties.rows))
                self._path[1].append(token)
                self._path[2].append(times)
            self._penalties.add(i, owner, *state.table())
            self._penalty += (
                sampling.repetition_penalty,
                sampling.frequency_penalty,
                sampling.presence_penalty,
            )
        if len(state.bias_ids):
            self._bias.add(i, owner, state.bias_ids, state.bias)
        if sampling.bad_words:
            words = state.banned_after(path)
            self._bad[0].extend([i] * len(words))
            self._bad[1].extend(words)
        if state.masks and (mask := state.masks[node]) is not None:
            self._allowed[0].append(i)
            self._allowed[1].append(mask.view(np.int64))
        if len(state.unused_ids):
            self._unused.add(i, owner, state.unused_ids, np.zeros(len(state.unused_ids)))

    @property
    def _tables(self) -> tuple[_Table, _Table, _Table]:
        return self._penalties, self._bias, self._unused

    def queue(self, buffer: Buffer) -> None:
        self._at = buffer.floats(self._penalty)
        buffer.ints(self._path[0])
        buffer.ints(self._path[1])
        buffer.floats(self._path[2])
        for pair in (self._bad, self._end):
            buffer.ints(pair[0])
            buffer.ints(pair[1])
        rows, masks = self._allowed
        buffer.ints(rows)
        buffer.ints(np.concatenate(masks) if masks else ())
        for table in self._tables:
            table.queue(buffer)

    def edits(self, sent: Sequence[Tensor]) -> Edits | None:
        """None if nothing was collected. sent: the buffer's tensors."""
        lists = self._bad[0] or self._end[0] or self._allowed[0]
        if not (lists or any(table.rows for table in self._tables)):
            return None
        penalty, which, token, times, *pairs = sent[self._at : self._at + 10]
        return Edits(
            penalties=self._penalties.spans(sent),
            penalty=penalty.view(torch.float64).view(-1, 3),
            path=(which, token, times.view(torch.float64)) if self._path[0] else None,
            bias=self._bias.spans(sent),
            unused=self._unused.spans(sent),
            allowed=(pairs[4], pairs[5].view(len(pairs[4]), -1)) if self._allowed[0] else None,
            bad=(pairs[0], pairs[1]) if self._bad[0] else None,
            end=(pairs[2], pairs[3]) if self._end[0] else None,
        )


def _judged(
    rows: Sequence[tuple[RowSampling, TokenTree, int, int]],
) -> tuple[list[_Entry], list[_Entry], list[_Entry], int]:
    """The logit rows that need work, by group, and the number of all logit rows.

    Nodes above the last given one are never drawn from: what follows them is known.
    """
    groups: tuple[list[_Entry], list[_Entry], list[_Entry]] = ([], [], [])
    count = 0
    for state, tree, position, logits_from in rows:
        n, last = len(tree.tokens), tree.given - 1
        if logits_from >= n:
            continue
        at, forced = count + max(last - logits_from, 0), state.forced
        count += n - logits_from - len(forced)
        if state.plain:
            continue
        into = groups[0 if not state.sampled else 2 if state.filtered else 1]
        if n == tree.given:
            if not forced:
                into.append((at, state, position + n, 0, (), 0))
            continue
        depths = range(n) if tree.is_chain else tree.depths()
        paths: dict[int, tuple[int, ...]] = {last: ()}
        for node in range(last, n):
            if state.follows_path and node > last:
                paths[node] = (*paths[tree.parents[node]], tree.tokens[node])
            if node >= logits_from and node - last not in forced:
                depth = depths[node]
                path = paths.get(node, ())
                drawn = position + depth + 1
                into.append((at, state, drawn, depth - last, path, node - last))
                at += 1
    return *groups, count


def pack(
    rows: Sequence[tuple[RowSampling, TokenTree, int, int]], device: torch.device | str
) -> NodeSampling | None:
    """What the logit rows of a step need, or None when the raw arg-max answers all of them.

    rows: per row of the batch, in order, (state, tree, position of node 0, first node with logits;
    it and all later ones have logits, save those the state knows as forced). Guesses on the path
    above a node count as if emitted.
    """
    greedy, free, filtered, count = _judged(rows)
    entries = greedy + free + filtered
    if not entries:
        return None
    keys: dict[tuple[int, int], int] = {}
    key_of = [keys.setdefault((e[1].seed, e[2]), len(keys)) for e in free]
    free_keys = len(keys)
    key_of += [keys.setdefault((e[1].seed, e[2]), len(keys)) for e in filtered]
    shared = len(keys) < len(key_of)
    edited = _Edited()
    for i, entry in enumerate(entries):
        edited.add(i, entry)
    work = [entry[0] for entry in entries]
    identity = len(work) == count and all(row == i for i, row in enumerate(work))
    limits = [entry[1].sampling for entry in filtered]
    # Limits beyond the vocabulary are none.
    top_k = [s.top_k if s.top_k < entries[0][1].vocab else 0 for s in limits]

    buffer = Buffer()
    buffer.ints(() if identity else work)
    buffer.floats([entry[1].temperature for entry in free + filtered])
    buffer.ints([seed for seed, _ in keys])
    buffer.ints([position for _, position in keys])
    buffer.ints(key_of if shared else ())
    buffer.ints(top_k)
    buffer.floats([s.top_p for s in limits])
    buffer.floats([s.min_p for s in limits])
    edited.queue(buffer)
    sent = buffer.send(torch.device(device))
    return NodeSampling(
        greedy=len(greedy),
        free=len(free),
        free_keys=free_keys,
        work=None if identity else sent[0],
        temperature=sent[1].view(torch.float64),
        key_seed=sent[2],
        key_position=sent[3],
        key_of=sent[4] if shared else None,
        top_k=sent[5],
        top_p=sent[6].view(torch.float64),
        min_p=sent[7].view(torch.float64),
        widest=max(top_k, default=0) if all(top_k) else 0,
        edits=edited.edits(sent),
    )
