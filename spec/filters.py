"""top_k, top_p and min_p: which tokens of a distribution survive, as candidates per row.

All three keep a prefix of one order (larger logit first, lower id first among equals), so the
result is a list of candidates. Wide rows on a CPU are cut down by thresholds, one after the other;
elsewhere all rows are ranked together without reading anything back. Both give the same survivors
as sorting the whole vocabulary. Knows nothing of seeds, penalties or trees.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

NEVER = float("-inf")
# A CPU row of at least this many tokens is filtered by itself: a few passes of numpy over it are
# cheaper than any selection that serves all rows together.
_WIDE = 2048
# Up to this many candidates a device selects instead of sorting the vocabulary.
_FEW = 1024
# First guess of how far below the best logit (in units of the temperature) survivors may lie.
_REACH = 8.0
_FARTHER = 1.3
LOWEST = float(np.finfo(np.float32).min)

_F32 = npt.NDArray[np.float32]
_I64 = npt.NDArray[np.int64]


def scaled(logits: Tensor, temperature: Tensor) -> Tensor:
    """(logits - their maximum) / temperature: [K, V] float32 and [K] float64, none of them zero.

    The maximum becomes 0, so that no temperature is too small. A row of -inf stays one.
    """
    top = logits.amax(-1, keepdim=True)
    top = top.masked_fill_(top == NEVER, 0.0)
    return (logits - top).div_(temperature.to(torch.float32)[:, None])


def ranked(logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The `count` largest logits per row, best first, the lower id first among equals."""
    vocab = logits.shape[-1]
    if count > _FEW or count >= vocab:
        values, ids = torch.sort(logits, dim=-1, descending=True, stable=True)
        return values[:, :count], ids[:, :count]
    if logits.device.type == "cpu":
        values, ids = logits.topk(count, dim=-1)  # which of equals it takes is left open
        rows = zip(logits.numpy(), ids.numpy(), values[:, -1].tolist(), strict=True)
        for row, best, least in rows:
            best[:] = _best_of_row(row, least, best)
        return logits.gather(-1, ids), ids
    ids = _ids_by_key(logits, count)
    return logits.gather(-1, ids), ids


def _ids_by_key(logits: Tensor, count: int) -> Tensor:
    """Ids of the `count` largest logits, in order, without reading anything back.

    Selects among integers that order like the floats and carry the reversed id below them, so that
    no two are equal.
    """
    vocab = logits.shape[-1]
    raw = (logits + 0.0).view(torch.int32).to(torch.int64)  # [K, V]; adding zero makes -0 a +0
    key = torch.where(raw < 0, raw ^ 0x7FFF_FFFF, raw) << 32
    key += torch.arange(vocab - 1, -1, -1, device=logits.device)
    return (vocab - 1) - (key.topk(count, dim=-1).values & 0xFFFF_FFFF)


def _best_of_row(row: _F32, least: float, otherwise: _I64) -> _I64:
    """Ids of the best logits down to `least`, as many as `otherwise` has, which serves if there are
    fewer (NaN)."""
    ids = np.flatnonzero(row >= np.float32(least))
    ids = ids[np.argsort(-row[ids], kind="stable")][: len(otherwise)]
    return ids if len(ids) == len(otherwise) else otherwise


def survivors(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, widest: int
) -> tuple[Tensor, Tensor]:
    """Candidates of each row: ids [F, C] int64 and scaled logits [F, C] float32.

    logits: [F, V] float32. temperature, top_p, min_p: [F] float64; top_k: [F], 0 = off. widest:
    the largest top_k if all rows have one, else 0. Excluded candidates and padding are -inf; each
    row keeps at least its best token.
    """
    if logits.device.type == "cpu" and logits.shape[-1] >= _WIDE:
        return _one_by_one(logits, temperature, top_k, top_p, min_p)
    count = min(widest or logits.shape[-1], logits.shape[-1])
    values, ids = ranked(logits, count)
    z = scaled(values, temperature)
    weight = z.exp()  # [F, C], the best token's is 1
    rank = torch.arange(count, device=logits.device)
    inside = (top_k[:, None] == 0) | (rank < top_k[:, None])
    # Sums in float64: no order of adding can move a token over the edge.
    mass = weight.to(torch.float64).masked_fill_(~inside, 0.0)
    before = mass.cumsum(-1) - mass
    inside &= (before < top_p[:, None] * mass.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    inside &= weight >= min_p[:, None]
    return ids, z.masked_fill_(~inside & (rank > 0), NEVER)


def _one_by_one(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor
) -> tuple[Tensor, Tensor]:
    rows = [
        _survivors_of_row(row, t, k, p, m)
        for row, t, k, p, m in zip(
            logits.numpy(),
            temperature.tolist(),
            top_k.tolist(),
            top_p.tolist(),
            min_p.tolist(),
            strict=True,
        )
    ]
    widest = max(len(ids) for ids, _ in rows)
    all_ids = np.zeros((len(rows), widest), dtype=np.int64)
    all_z = np.full((len(rows), widest), NEVER, dtype=np.float32)
    for i, (ids, z) in enumerate(rows):
        all_ids[i, : len(ids)] = ids
        all_z[i, : len(z)] = z
    return torch.from_numpy(all_ids), torch.from_numpy(all_z)


def _weights(z: _F32) -> _F32:
    """exp by torch, so that all paths on a CPU round alike."""
    result: _F32 = torch.from_numpy(z).exp_().numpy()
    return result


def _survivors_of_row(
    row: _F32, temperature: float, top_k: int, top_p: float, min_p: float
) -> tuple[_I64, _F32]:
    """The same for one row: looks at tokens near the best one, farther only if it must."""
    top = row.max()
    if not np.isfinite(top):
        return np.array([row.argmax()]), np.array([min(top, 0)], dtype=np.float32)
    t = np.float32(temperature)
    total = math.inf  # weight of the whole row; needed for a top_p without top_k only
    if top_p < 1 and not top_k:
        total = float(_weights((row - top) / t).sum(dtype=np.float64))
    # Beyond `useful` min_p excludes everything (with room for rounding).
    useful = 1.0 - math.log(min_p) if min_p > 0 else math.inf
    reach = useful if top_p >= 1 and not top_k else min(_REACH, useful)
    while True:
        floor = np.float32(max(float(top) - reach * temperature, LOWEST))
        ids = np.flatnonzero(row >= floor)
        z = (row[ids] - top) / t
        weight = _weights(z.copy())
        if reach == math.inf or (top_k and len(ids) >= top_k):
            break
        if not (top_k and top_p < 1) and reach >= useful:
            break
        if not top_k and weight.sum(dtype=np.float64) >= top_p * total:
            break
        reach = reach * _FARTHER if reach < 1000 else math.inf
    order = np.argsort(-row[ids], kind="stable")
    if top_k:
        order = order[:top_k]
    ids, z, weight = ids[order], z[order], weight[order]
    keep = weight >= min_p
    if top_p < 1:
        mass = weight.astype(np.float64)
        sums = mass.cumsum()
        keep &= sums - mass < top_p * (float(sums[-1]) if top_k else total)
    kept = max(1, int(np.count_nonzero(keep)))
    return ids[:kept], z[:kept]
