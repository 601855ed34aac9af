"""What this machine can do at most: bytes read per second, products of numbers per second.

Measured by compiled loops that do nothing else (csrc/ceilings.cpp), on the threads that a model
would use: what a kernel reaches is judged against these. Knows no matrix and no model.
"""

from __future__ import annotations

from ctypes import CDLL, c_char_p, c_int32, c_int64, c_uint64, c_void_p
from functools import cache
from pathlib import Path
from time import perf_counter

import torch

from spec_serve.kernels.cpu.native import NativeUnavailable, Pool, load

SECONDS = 0.05  # a measurement of arithmetic takes about this long
FLOATS = 32


@cache
def _library() -> CDLL:
    made = load()
    try:
        made.spec_native_stream.restype = c_uint64
        made.spec_native_stream.argtypes = [c_void_p, c_int64, c_void_p]
        made.spec_native_macs.restype = c_int64
        made.spec_native_macs.argtypes = [c_char_p, c_int32, c_int64, c_void_p]
    except AttributeError as error:
        raise NativeUnavailable("the compiled library is an older one; install anew") from error
    return made


def buffer_bytes() -> int:
    """Bytes that no cache holds: four times the last level, between 256 MiB and 1 GiB."""
    sizes = [1 << 26]
    for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        text = path.read_text().strip()
        if text[-1:] in "KM" and text[:-1].isdigit():
            sizes.append(int(text[:-1]) << (10 if text[-1] == "K" else 20))
    return min(4 * max(sizes), 1 << 30)


def bandwidth(pool: Pool, nbytes: int = 0, repeat: int = 5) -> float:
    """Bytes per second that all threads read together, the best of `repeat`; nbytes: the buffer."""
    held = torch.ones(nbytes or buffer_bytes(), dtype=torch.uint8)
    took: list[float] = []
    for _ in range(repeat + 1):
        begun = perf_counter()
        _library().spec_native_stream(held.data_ptr(), held.numel(), pool.handle)
        took.append(perf_counter() - begun)
    return held.numel() / min(took[1:])


def arithmetic(pool: Pool, bits: int, isa: str = "auto", repeat: int = 5) -> float:
    """Products summed per second, the best of `repeat`, by all threads.

    bits: of the weights times 8-bit activations, summed as the kernels of that instruction set do;
    FLOATS = float32. ValueError for an instruction set that is not to be had.
    """

    def run(rounds: int) -> tuple[int, float]:
        begun = perf_counter()
        made = _library().spec_native_macs(isa.encode(), bits, rounds, pool.handle)
        return made, perf_counter() - begun

    rounds = 1000
    made, took = run(rounds)
    if not made:
        raise ValueError(f"isa: {isa!r} is not to be had on this processor")
    while took < SECONDS / 10:
        rounds *= 4
        made, took = run(rounds)
    rounds = max(int(rounds * SECONDS / took), 1)
    return max(done / seconds for done, seconds in (run(rounds) for _ in range(repeat)))
