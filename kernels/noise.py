"""Position-keyed Gumbel noise: the randomness of all sampling.

A value depends on three numbers only: the row's 64-bit seed, the absolute position of the token
being drawn and the token's id. So whoever asks (target or drafter, whatever the batch or device)
sees the same uniform bits; only the last bits of the two logarithms may differ between devices.
Knows nothing of logits, temperatures or trees, and keeps no state.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# The stream increment and multipliers of splitmix64 (Steele, Lea, Flood: Fast splittable
# pseudorandom number generators, 2014) and the 32-bit finaliser of MurmurHash3 (Appleby).
_GAMMA = 0x9E3779B97F4A7C15
_MIX64 = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))
_MIX32 = ((16, 0x85EBCA6B), (13, 0xC2B2AE35))

# float32 has 24 bits: beyond this, u would round to 1 and the noise to -inf.
_U_MAX = 1.0 - 2.0**-24
# Room for the rounding of float32 logarithms when a bound on noise becomes one on bits.
_SLACK = 1e-3
# Elements per pass on a CPU, so that the passes stay inside the second-level cache.
_BLOCK = 1 << 16

# Modular inverses of the multipliers of _MIX32.
_UNMIX32 = tuple(pow(factor, -1, 1 << 32) for _, factor in _MIX32)

_U32 = npt.NDArray[np.uint32]


def gumbel(seeds: Tensor, positions: Tensor, vocab: int) -> Tensor:
    """Standard Gumbel noise [K, vocab] float32 for token ids 0..vocab-1, always finite.

    seeds, positions: [K] int64 on the device of the result; positions are those of the tokens being
    drawn. Adding it to log-probabilities and taking the arg-max draws a sample.
    """
    if seeds.device.type == "cpu":
        return _gumbel_cpu(seeds.numpy(), positions.numpy(), np.arange(vocab, dtype=np.uint32))
    tokens = torch.arange(vocab, dtype=torch.int32, device=seeds.device)
    return _to_gumbel(bits(seeds, positions, tokens[None, :]))


def gumbel_of(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """The noise of chosen token ids only: [K, C] float32 for tokens [K, C] int64."""
    if seeds.device.type == "cpu":
        ids = tokens.numpy().astype(np.uint32)
        return _gumbel_cpu(seeds.numpy(), positions.numpy(), ids)
    return _to_gumbel(bits(seeds, positions, tokens.to(torch.int32)))


def bits(seeds: Tensor, positions: Tensor, tokens: Tensor) -> Tensor:
    """Uniform 32-bit values [K, C] int64 in 0..2^32-1 in torch operators, for any device.

    tokens: [K or 1, C] int32. The CPU path yields the same ones faster.
    """
    state = _mix64(seeds + _signed(_GAMMA, 64))
    key = _mix64(state + positions * _signed(_GAMMA, 64))  # [K]
    low, high = key.to(torch.int32), (key >> 32).to(torch.int32)
    h = _mix32(tokens + low[:, None])  # [K, C]
    return _mix32(h ^ high[:, None]).to(torch.int64) & 0xFFFF_FFFF


@dataclass(frozen=True, slots=True)
class HostNoise:
    """The noise of one (seed, position) on the host, where only a part of it is wanted.

    low, high: the halves of the pair's hash, as arrays [1]; see `host_noise`.
    """

    low: _U32
    high: _U32

    def of(self, tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Noise of these token ids [C]: the same numbers as `gumbel`'s."""
        h = tokens.astype(np.uint32)
        h += self.low
        scratch = np.empty_like(h)
        _mix32_in_place(h, scratch)
        h ^= self.high
        _mix32_in_place(h, scratch)
        noise: npt.NDArray[np.float32] = _to_gumbel(torch.from_numpy(h.astype(np.float32))).numpy()
        return noise

    def above(self, least: float, vocab: int) -> npt.NDArray[np.int64]:
        """All token ids below `vocab` whose noise exceeds `least`, and perhaps some just below it.

        The hash is a bijection: running the few uniform bits that are small enough through its
        inverse finds their tokens without looking at the vocabulary. The work is 2^32 exp(-least),
        so `least` must be large (see `loudness`).
        """
        count = math.ceil(-math.expm1(-math.exp(_SLACK - least)) * 2**32) + 1
        assert count < 1 << 24, "noise this small is common: look at the vocabulary instead"
        h = np.arange(count, dtype=np.uint32)
        scratch = np.empty_like(h)
        _unmix32_in_place(h, scratch)
        h ^= self.high
        _unmix32_in_place(h, scratch)
        h -= self.low
        return h[h < vocab].astype(np.int64)


def loudness(share: float) -> float:
    """The noise above which `above` has to try `share` uniform values."""
    return -math.log(-math.log1p(-share * 2.0**-32))


def host_noise(seeds: Tensor, positions: Tensor) -> list[HostNoise]:
    """One `HostNoise` per (seed, position) pair; CPU tensors [K]."""
    low, high = _keys(seeds.numpy(), positions.numpy())
    return [HostNoise(low[i : i + 1], high[i : i + 1]) for i in range(len(low))]


def mix_seed(seed: int, index: int) -> int:
    """An independent signed 64-bit seed for the index-th sibling of what `seed` belongs to."""
    x = (_hash64(seed) + index * _GAMMA) % (1 << 64)
    return _signed(_hash64(x ^ _GAMMA), 64)


def _hash64(value: int) -> int:
    """splitmix64 of one Python integer."""
    x = (value + _GAMMA) % (1 << 64)
    for shift, factor in _MIX64:
        x = (x ^ (x >> shift)) * factor % (1 << 64)
    return x ^ (x >> 31)


def _to_gumbel(uniform: Tensor) -> Tensor:
    """Small bits give large noise: float32 resolves u finely near 0, not near 1."""
    u = uniform.to(torch.float32, copy=True).add_(0.5).mul_(2.0**-32).clamp_(max=_U_MAX)
    return u.neg_().log1p_().neg_().log_().neg_()


def _signed(value: int, width: int) -> int:
    """The two's complement reading of an unsigned constant."""
    return value - (1 << width) if value >> (width - 1) else value


def _shifted(x: Tensor, count: int, width: int) -> Tensor:
    """Logical right shift of a signed tensor."""
    return (x >> count) & ((1 << (width - count)) - 1)


def _mix64(x: Tensor) -> Tensor:
    for shift, factor in _MIX64:
        x = (x ^ _shifted(x, shift, 64)) * _signed(factor, 64)
    return x ^ _shifted(x, 31, 64)


def _mix32(x: Tensor) -> Tensor:
    for shift, factor in _MIX32:
        x = (x ^ _shifted(x, shift, 32)) * _signed(factor, 32)
    return x ^ _shifted(x, 16, 32)


def _keys(seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]) -> tuple[_U32, _U32]:
    """The two 32-bit halves [K] of each (seed, position)'s hash."""
    gamma = np.uint64(_GAMMA)

    def mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        for shift, factor in _MIX64:
            x = (x ^ (x >> np.uint64(shift))) * np.uint64(factor)
        return x ^ (x >> np.uint64(31))

    key = mix(mix(seeds.astype(np.uint64) + gamma) + positions.astype(np.uint64) * gamma)
    return key.astype(np.uint32), (key >> np.uint64(32)).astype(np.uint32)


def _mix32_in_place(x: _U32, scratch: _U32) -> None:
    for shift, factor in _MIX32:
        np.right_shift(x, np.uint32(shift), out=scratch)
        np.bitwise_xor(x, scratch, out=x)
        np.multiply(x, np.uint32(factor), out=x)
    np.right_shift(x, np.uint32(16), out=scratch)
    np.bitwise_xor(x, scratch, out=x)


def _unmix32_in_place(x: _U32, scratch: _U32) -> None:
    """The inverse of `_mix32_in_place`."""
    first, second = (np.uint32(factor) for factor in _UNMIX32)
    np.right_shift(x, np.uint32(16), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, second, out=x)
    np.right_shift(x, np.uint32(13), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    # A shift of 13 bits leaves two further steps, 26 bits away and none beyond that.
    np.right_shift(scratch, np.uint32(13), out=scratch)
    np.bitwise_xor(x, scratch, out=x)
    np.multiply(x, first, out=x)
    np.right_shift(x, np.uint32(16), out=scratch)
    np.bitwise_xor(x, scratch, out=x)


def _gumbel_cpu(
    seeds: npt.NDArray[np.int64], positions: npt.NDArray[np.int64], tokens: npt.NDArray[Any]
) -> Tensor:
    """tokens: [C] for all rows or [K, C]. Rows are taken in blocks that fit the cache."""
    low, high = _keys(seeds, positions)
    rows, width = len(seeds), tokens.shape[-1]
    out = torch.empty((rows, width), dtype=torch.float32)
    step = max(1, _BLOCK // max(width, 1))
    h = np.empty((min(step, rows), width), dtype=np.uint32)
    scratch = np.empty_like(h)
    for first in range(0, rows, step):
        last = min(first + step, rows)
        part, spare = h[: last - first], scratch[: last - first]
        of = tokens if tokens.ndim == 1 else tokens[first:last]
        np.add(of, low[first:last, None], out=part)
        _mix32_in_place(part, spare)
        np.bitwise_xor(part, high[first:last, None], out=part)
        _mix32_in_place(part, spare)
        u = out[first:last]
        np.copyto(u.numpy(), part, casting="unsafe")
        u.add_(0.5).mul_(2.0**-32).clamp_(max=_U_MAX)
        u.neg_().log1p_().neg_().log_().neg_()
    return out
