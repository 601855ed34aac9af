"""From the target's logits to one chosen token per node, and the noise drafters share.

`adjust` and `choose` are pure functions of logits and a packed `NodeSampling`. What a row gets
depends on its own logits, path and seed only: never on its neighbours or on how large the tree is.
Knows nothing of acceptance (verify.py), stops or requests' lives.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from spec_serve.kernels.noise import HostNoise, gumbel, gumbel_of, host_noise, loudness
from spec_serve.spec.choice import RowSampling
from spec_serve.spec.filters import LOWEST, NEVER, scaled, survivors
from spec_serve.spec.nodes import Buffer, NodeSampling, Spans, pack

# From this vocabulary on, rows of a CPU batch are drawn one by one.
_WIDE = 2048
# Bytes of a bit row that hold something, up to which the allowed ids are gathered one by one.
_FEW = 128
# How far below the best logit, in units of the temperature, tokens are looked at first.
_NEAR = 5.0
# Noise counts as loud if about one in this many of the vocabulary's size is tried to find it all.
_LOUD = 8
# Room for rounding in sums of logits and noise.
_MARGIN = 0.01

_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]

__all__ = ["NodeSampling", "RowNoise", "RowSampling", "adjust", "choose", "pack"]


def adjust(logits: Tensor, nodes: NodeSampling) -> Tensor:
    """Final logits [M, V] float32 of all rows: log-probabilities up to a constant, -inf = excluded.

    logits: [M, V], left as they are. Rows without a need for work are the raw logits, rows at
    T = 0 the edited ones. Order of operations: see `Sampling`. If the masks exclude every token,
    those of min_tokens yield first, then bad words; ids never to be used stay excluded.
    """
    out = logits.to(torch.float32, copy=True)
    x = edited(logits, nodes)
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
    x = edited(logits, nodes)
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

    @classmethod
    def over(cls, seeds: Tensor, temperature: Tensor) -> RowNoise:
        """The noise of rows that only the device knows: seeds [B] int64, temperature [B] float64,
        read whenever noise is added."""
        noise = cls.__new__(cls)
        noise._any, noise._all = True, False
        noise._seeds, noise._temperature = seeds, temperature
        return noise

    @property
    def seeds(self) -> Tensor:
        """[B] int64."""
        return self._seeds

    @property
    def temperature(self) -> Tensor:
        """[B] float64, 0 = greedy."""
        return self._temperature

    def add(
        self, logits: Tensor, rows: Tensor, positions: Tensor, ids: Tensor | None = None
    ) -> Tensor:
        """logits [K, V] of rows [K] for the tokens at `positions` [K]: scaled and with noise.

        ids: [V] token of each column, None = 0..V-1. Returns float32 (the input itself if every
        row is greedy)."""
        if not self._any:
            return logits
        x = logits.to(torch.float32)
        temperature, seeds = self._temperature[rows], self._seeds[rows]
        if ids is None and x.device.type == "cpu" and x.shape[1] >= _WIDE:
            return _with_noise(x, temperature, host_noise(seeds, positions))
        warm = temperature[:, None] > 0
        noisy = scaled(x, temperature.where(warm[:, 0], 1.0))
        if ids is None:
            noisy += gumbel(seeds, positions, x.shape[1])
        else:
            noisy += gumbel_of(seeds, positions, ids.expand(x.shape[0], -1))
        return noisy if self._all else torch.where(warm, noisy, x)


def _with_noise(logits: Tensor, temperature: Tensor, noises: Sequence[HostNoise]) -> Tensor:
    """Scaled logits [K, V] with noise on the tokens that can win; the rest is too far behind."""
    out = torch.empty_like(logits)
    rows = zip(logits.numpy(), temperature.tolist(), noises, strict=True)
    for i, (row, t, noise) in enumerate(rows):
        if t > 0:
            ids, total = contenders(row, t, noise)
            out[i : i + 1] = scaled(logits[i : i + 1], temperature[i : i + 1])
            out.numpy()[i, ids] = total
        else:
            out[i] = logits[i]
    return out


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
    noises = host_noise(seeds, positions)
    keys = range(len(free)) if key_of is None else key_of.tolist()
    picks = [
        _draw_from_row(row, t, noises[key])
        for row, t, key in zip(free.numpy(), temperature.tolist(), keys, strict=True)
    ]
    return torch.tensor(picks)


def _draw_from_row(row: _F32, temperature: float, noise: HostNoise) -> int:
    """Arg-max of scaled logits plus noise, looking only at tokens that can win."""
    ids, total = contenders(row, temperature, noise)
    return int(ids[total == total.max()].min()) if len(ids) else int(row.argmax())


def contenders(row: _F32, temperature: float, noise: HostNoise) -> tuple[_I64, _F32]:
    """Tokens of a row [V] that can be the arg-max of scaled logits plus noise, and these sums.

    Tokens near the best logit come first; any other needs noise so large that it is rare, and
    those few are found from the noise's side: noise of the whole vocabulary is never computed, and
    yet the result is the same. Ids may repeat. A row without a finite maximum has none.
    """
    top = row.max()
    if not np.isfinite(top):
        return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
    t = np.float32(temperature)
    reach, loud = _NEAR, loudness(len(row) / _LOUD)
    while True:
        floor = np.float32(max(float(top) - reach * temperature, LOWEST))
        near = np.flatnonzero(row >= floor)
        total = (row[near] - top) / t + noise.of(near)
        # Whoever is not near lies below -reach, so it wins only with noise above best + reach.
        needed = float(total.max()) + reach
        if needed >= loud:
            break
        reach += loud - needed + _MARGIN
    far = noise.above(needed - _MARGIN, len(row)) if len(near) < len(row) else near[:0]
    if not len(far):
        return near, total
    return (
        np.concatenate((near, far)),
        np.concatenate((total, (row[far] - top) / t + noise.of(far))),
    )


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


def edited(logits: Tensor, nodes: NodeSampling) -> Tensor:
    """Logits of the rows that need work, in work order [K, V] float32, with penalties, bias and
    masks applied; the input itself if there is nothing to do."""
    x = logits if nodes.work is None else logits.index_select(0, nodes.work)
    x = x.to(torch.float32)
    edits = nodes.edits
    if edits is None:
        return x
    if nodes.work is None:
        x = x.clone(memory_format=torch.contiguous_format)
    vocab, flat = x.shape[1], x.view(-1)
    if edits.penalties is not None:
        _penalise(flat, vocab, edits.penalties, edits.penalty, edits.path)
    if edits.bias is not None:
        which, at = edits.bias.expand()
        cells = edits.bias.rows[which] * vocab + edits.bias.ids[at]
        added = flat.index_select(0, cells) + edits.bias.values[at].to(torch.float32)
        flat.index_copy_(0, cells, added)
    if edits.unused is not None:
        which, at = edits.unused.expand()
        flat.index_fill_(0, edits.unused.rows[which] * vocab + edits.unused.ids[at], NEVER)
    if edits.allowed is not None:
        _restrict(x, *edits.allowed)
    masks = []
    for pair in (edits.bad, edits.end):
        if pair is not None:
            cells = pair[0] * vocab + pair[1]
            masks.append((pair[0], cells, flat.index_select(0, cells)))
            flat.index_fill_(0, cells, NEVER)
    for rows, cells, values in reversed(masks):  # rows left without any token: undo, last first
        dead = x.amax(-1) == NEVER
        flat.index_copy_(0, cells, values.masked_fill(~dead[rows], NEVER))
    return x


def _restrict(x: Tensor, rows: Tensor, bits: Tensor) -> None:
    """Exclude in place what isn't allowed. rows: [Q] of x [K, V]; bits: [Q, W], id 64 w + b is bit
    b of word w; ids beyond them are excluded. Ids are gathered where few are allowed."""
    vocab = x.shape[1]
    if x.device.type == "cpu":
        held = x.numpy()
        packed = bits.contiguous().numpy().view(np.uint8)
        for row, own in zip(rows.tolist(), packed, strict=True):
            allowed = np.unpackbits(own, bitorder="little", count=vocab).view(np.bool_)
            if np.count_nonzero(own) <= _FEW:
                ids = np.flatnonzero(allowed)
                values = held[row, ids]
                held[row] = NEVER
                held[row, ids] = values
            else:
                np.copyto(held[row], NEVER, where=~allowed)
        return
    places = torch.arange(64, device=x.device)
    allowed_ = ((bits.unsqueeze(-1) >> places) & 1).flatten(1).bool()[:, :vocab]  # [Q, V']
    if allowed_.shape[1] < vocab:
        allowed_ = torch.nn.functional.pad(allowed_, (0, vocab - allowed_.shape[1]))
    x.index_copy_(0, rows, x.index_select(0, rows).masked_fill_(~allowed_, NEVER))


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
