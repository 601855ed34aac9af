"""From the target's logits to one chosen token per node, and the noise drafters share.

`adjust` and `choose` are pure functions of logits and a packed `NodeSampling`. What a row gets
depends on its own logits, path and seed only: never on its neighbours or on how large the tree is.
Knows nothing of acceptance (verify.py), stops or requests' lives.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from spec_serve.kernels.noise import gumbel, gumbel_of
from spec_serve.spec.choice import RowSampling
from spec_serve.spec.filters import NEVER, scaled, survivors
from spec_serve.spec.nodes import Buffer, NodeSampling, Spans, pack

# From this vocabulary on, rows of a CPU batch are drawn one by one.
_WIDE = 2048

__all__ = ["NodeSampling", "RowNoise", "RowSampling", "adjust", "choose", "pack"]


def adjust(logits: Tensor, nodes: NodeSampling) -> Tensor:
    """Final logits [M, V] float32 of all rows: log-probabilities up to a constant, -inf = excluded.

    logits: [M, V], left as they are. Rows without a need for work are the raw logits, rows at
    T = 0 the edited ones. Order of operations: see `Sampling`. If the masks exclude every token,
    those of min_tokens yield first, then bad words; ids never to be used stay excluded.
    """
    out = logits.to(torch.float32, copy=True)
    x = _edited(logits, nodes)
    _, free, filtered = x.split_with_sizes(_groups(x, nodes))
    if len(free) or len(filtered):
        x = x.clone()
    done, behind = nodes.greedy, nodes.greedy + nodes.free
    if len(free):
        x[done:behind] = scaled(free, nodes.temperature[: nodes.free])
    if len(filtered):
        ids, z = _survivors(filtered, nodes)
        x[behind:] = NEVER
        x[behind:].scatter_reduce_(1, ids, z, "amax")
    return x if nodes.work is None else out.index_copy_(0, nodes.work, x)


def choose(logits: Tensor, nodes: NodeSampling | None) -> Tensor:
    """One token per logit row [M] int64: a sample of its final distribution.

    The arg-max of `adjust` plus, at T > 0, the noise of the row's seed at the position of the token
    to be drawn; the lowest id among equals. nodes None: the arg-max of the raw logits [M, V].
    """
    if nodes is None:
        return _first_max(logits)
    x = _edited(logits, nodes)
    greedy, free, filtered = x.split_with_sizes(_groups(x, nodes))
    picks: list[Tensor] = []
    if len(greedy):
        picks.append(_first_max(greedy))
    if len(free):
        picks.append(_draw(free, nodes))
    if len(filtered):
        ids, z = _survivors(filtered, nodes)
        which = slice(nodes.free, None)
        key = which if nodes.key_of is None else nodes.key_of[which]
        z = z + gumbel_of(nodes.key_seed[key], nodes.key_position[key], ids)
        best = z == z.amax(-1, keepdim=True)
        # No best one among NaN: any id will do, but it has to be one.
        picks.append(ids.masked_fill(~best, x.shape[1] - 1).amin(-1))
    picked = torch.cat(picks) if len(picks) > 1 else picks[0]
    if nodes.work is None:
        return picked
    return _first_max(logits).index_copy_(0, nodes.work, picked)


class RowNoise:
    """The target's noise for drafters: `draft.base.Noise` over the drafting rows 0..B-1.

    A drafter that adds it to its own logits guesses the token the target will draw whenever the two
    distributions are close. Filters and penalties play no part: a guess needn't be right.
    """

    def __init__(self, rows: Sequence[RowSampling], device: torch.device | str) -> None:
        sampled = [row.sampled for row in rows]
        self._any, self._all = any(sampled), all(sampled)
        buffer = Buffer()
        buffer.ints([row.seed for row in rows])
        buffer.floats([row.temperature for row in rows])
        self._seeds, temperature = buffer.send(torch.device(device))
        self._temperature = temperature.view(torch.float64)

    def add(self, logits: Tensor, rows: Tensor, positions: Tensor) -> Tensor:
        """logits [K, V] of rows [K] for the tokens at `positions` [K]: scaled and with noise.

        Returns float32 (the input itself if every row is greedy)."""
        if not self._any:
            return logits
        x = logits.to(torch.float32)
        temperature = self._temperature[rows]
        seeds = self._seeds[rows]
        if self._all:
            return scaled(x, temperature).add_(_shared_noise(seeds, positions, x.shape[1]))
        warm = temperature > 0
        if x.device.type == "cpu":  # reading is free here, noise isn't
            at = warm.nonzero().squeeze(1)
            if not len(at):
                return logits
            noisy = scaled(x[at], temperature[at])
            noisy += _shared_noise(seeds[at], positions[at], x.shape[1])
            return x.index_copy(0, at, noisy)
        noisy = scaled(x, temperature.masked_fill(~warm, 1.0))
        noisy += gumbel(seeds, positions, x.shape[1])
        return torch.where(warm[:, None], noisy, x)


def _shared_noise(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """`gumbel`, computed once for equal (seed, position) pairs where looking is free."""
    if seeds.device.type != "cpu" or len(seeds) == 1:
        return gumbel(seeds, positions, vocab)
    keys: dict[tuple[int, int], int] = {}
    pairs = zip(seeds.tolist(), positions.tolist(), strict=True)
    where = [keys.setdefault(pair, len(keys)) for pair in pairs]
    if len(keys) == len(where):
        return gumbel(seeds, positions, vocab)
    distinct = torch.tensor(list(keys))
    return gumbel(distinct[:, 0], distinct[:, 1], vocab)[torch.tensor(where)]


def _draw(free: Tensor, nodes: NodeSampling) -> Tensor:
    """Tokens of the sampled rows without filters [free]."""
    vocab = free.shape[1]
    temperature = nodes.temperature[: nodes.free]
    seeds, positions = nodes.key_seed[: nodes.free_keys], nodes.key_position[: nodes.free_keys]
    key_of = None if nodes.key_of is None else nodes.key_of[: nodes.free]
    if free.device.type != "cpu" or vocab < _WIDE:
        noise = gumbel(seeds, positions, vocab)
        if key_of is not None:
            noise = noise.index_select(0, key_of)
        return _first_max(scaled(free, temperature).add_(noise))
    # One key after the other: what a row needs then stays in the cache.
    picked = torch.empty(len(free), dtype=torch.int64)
    rows_of: list[list[int]] = [[] for _ in range(len(seeds))]
    for row, key in enumerate(range(len(free)) if key_of is None else key_of.tolist()):
        rows_of[key].append(row)
    for key, rows in enumerate(rows_of):
        noise = gumbel(seeds[key : key + 1], positions[key : key + 1], vocab)
        for row in rows:
            one = slice(row, row + 1)
            picked[one] = _first_max(scaled(free[one], temperature[one]).add_(noise))
    return picked


def _groups(x: Tensor, nodes: NodeSampling) -> list[int]:
    return [nodes.greedy, nodes.free, len(x) - nodes.greedy - nodes.free]


def _first_max(logits: Tensor) -> Tensor:
    """Arg-max per row, the lowest id among equals: [M]."""
    if logits.device.type == "cpu" and logits.dtype == torch.float32 and logits.numel():
        return torch.from_numpy(logits.numpy().argmax(-1))  # several times faster than torch's
    return logits.argmax(-1)


def _survivors(filtered: Tensor, nodes: NodeSampling) -> tuple[Tensor, Tensor]:
    temperature = nodes.temperature[nodes.free :]
    return survivors(filtered, temperature, nodes.top_k, nodes.top_p, nodes.min_p, nodes.widest)


def _edited(logits: Tensor, nodes: NodeSampling) -> Tensor:
    """Logits of the rows that need work, in work order [K, V] float32, with penalties, bias and
    masks applied; the input itself if there is nothing to do."""
    x = logits if nodes.work is None else logits.index_select(0, nodes.work)
    x = x.to(torch.float32)
    if not nodes.edits:
        return x
    if nodes.work is None:
        x = x.clone(memory_format=torch.contiguous_format)
    vocab, flat = x.shape[1], x.view(-1)
    if nodes.penalties is not None:
        _penalise(flat, vocab, nodes.penalties, nodes.penalty, nodes.path)
    if nodes.bias is not None:
        which, at = nodes.bias.expand()
        cells = nodes.bias.rows[which] * vocab + nodes.bias.ids[at]
        added = flat.index_select(0, cells) + nodes.bias.values[at].to(torch.float32)
        flat.index_copy_(0, cells, added)
    if nodes.unused is not None:
        which, at = nodes.unused.expand()
        flat.index_fill_(0, nodes.unused.rows[which] * vocab + nodes.unused.ids[at], NEVER)
    masks = []
    for pair in (nodes.bad, nodes.end):
        if pair is not None:
            cells = pair[0] * vocab + pair[1]
            masks.append((pair[0], cells, flat.index_select(0, cells)))
            flat.index_fill_(0, cells, NEVER)
    for rows, cells, values in reversed(masks):  # rows left without any token: undo, last first
        dead = x.amax(-1) == NEVER
        flat.index_copy_(0, cells, values.masked_fill(~dead[rows], NEVER))
    return x


def _penalise(
    flat: Tensor,
    vocab: int,
    table: Spans,
    penalty: Tensor,
    path: tuple[Tensor, Tensor, Tensor] | None,
) -> None:
    """Apply the penalties in place: what stood before the step first, then the guesses' tokens with
    their exact counts, both computed from the untouched logits."""
    which, at = table.expand()
    cells = table.rows[which] * vocab + table.ids[at]
    new = _penalised(flat.index_select(0, cells), table.values[at], penalty[which])
    if path is None:
        flat.index_copy_(0, cells, new)
        return
    guess_cells = table.rows[path[0]] * vocab + path[1]
    guessed = _penalised(flat.index_select(0, guess_cells), path[2], penalty[path[0]])
    flat.index_copy_(0, cells, new)
    flat.index_copy_(0, guess_cells, guessed)


def _penalised(logits: Tensor, times: Tensor, penalty: Tensor) -> Tensor:
    """logits, times: [E]; penalty: [E, 3]. Repetition as in Keskar et al. (CTRL, 2019) with the
    sign rule that has become common: positive logits are divided, negative ones multiplied."""
    repetition, frequency, presence = penalty.to(torch.float32).unbind(1)
    times = times.to(torch.float32)
    out = torch.where(logits > 0, logits / repetition, logits * repetition)
    return out - (frequency * times + presence * (times > 0))
