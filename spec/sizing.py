"""What this machine can do: step times over nodes, threads that pay, memory for the K/V store.

Measured once at start, before any request. Knows the device half and numbers; no requests.
"""

from __future__ import annotations

import os
from itertools import accumulate
from random import Random
from time import perf_counter, process_time

import torch

from spec_serve.cache.batch import Twig
from spec_serve.cache.pool import KVSpec, bytes_per_slot
from spec_serve.cache.tree import chain
from spec_serve.draft.cost import CostCurve
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowSampling
from spec_serve.spec.step import Job, TorchDevice
from spec_serve.target.native import NativeTransformer

CONTEXT = 1024  # slots over which the cost of context is measured
WIDE = 8  # nodes at which it is measured beside one
HELD_BACK = 64 << 20  # bytes never given to the K/V store when it is sized by what is free


def spread(vocab: int, n: int) -> list[int]:
    """n token ids below `vocab` of no meaning, always the same ones.

    Equal tokens would be sent to the same few experts of a mixture. Those of a tree differ, though
    less than these: n of them touch somewhat fewer experts, which live timings correct.
    """
    return Random(0).choices(range(vocab), k=n)


def _timed(device: TorchDevice, n: int, context: int = 0) -> float:
    """Milliseconds of a step over a chain of n nodes behind `context` cached tokens."""
    tokens = spread(device.model.config.vocab, n)
    state = RowSampling(Sampling(), 0, device.model.config.vocab, [1], 0, frozenset())
    slots = range(context + 1, context + n + 1)
    job = Job([Twig(0, context, chain(tokens, given=1), slots, 0)], [state], [0], [-1], n - 1)
    busy, begun = process_time(), perf_counter()
    device.step(job)
    taken, busy = perf_counter() - begun, process_time() - busy
    # Of a step that took longer than all threads computed, others had the processor.
    return (min(taken, busy) if device.pool.device.type == "cpu" else taken) * 1e3


def quickest(device: TorchDevice, n: int, most: int = 6, seconds: float = 0.3) -> float:
    """Milliseconds of the quickest of several steps over a chain of n nodes.

    The quickest, because other work on the machine only ever makes a step slower.
    """
    _timed(device, n)
    times: list[float] = []
    while len(times) < 2 or (len(times) < most and sum(times) < seconds * 1e3):
        times.append(_timed(device, n))
    return min(times)


def measure(device: TorchDevice, sizes: list[int], seconds: float = 1.0) -> CostCurve:
    """The cost of a step over n nodes, for each n of `sizes` (ascending), and of their context.

    All sizes take turns, so that other work on the machine makes none of them look dear against
    the others; the quickest of each counts. Takes about `seconds`, or two rounds if those take
    longer; trees are seldom large, so that large sizes are timed once.
    """
    table = device.pool.table
    length = min(CONTEXT, device.pool.slots, table.shape[1] - 1) - WIDE
    asked = [(n, 0) for n in sizes]
    if length >= CONTEXT // 8:
        asked += [(1, length), (WIDE, length)] + ([] if WIDE in sizes else [(WIDE, 0)])
        before = table[0].clone()
        table[0, :length] = torch.arange(1, length + 1, device=table.device)
    times: dict[tuple[int, int], list[float]] = {key: [] for key in asked}
    _timed(device, 1)
    begun = perf_counter()
    rounds = 0
    while rounds < 2 or (rounds < 8 and perf_counter() - begun < seconds):
        for (n, behind), taken in times.items():
            if rounds < 1 or n <= 2 * WIDE:
                taken.append(_timed(device, n, behind))
        rounds += 1
    least = {key: min(taken) for key, taken in times.items()}
    # A timing errs to one side only: what fewer nodes took can't be more than what more took.
    quick = [*accumulate((least[n, 0] for n in reversed(sizes)), min)]
    points = [*zip(sizes, reversed(quick), strict=True)]
    if length < CONTEXT // 8:
        return CostCurve(points)
    table[0] = before
    one = max(least[1, length] - least[1, 0], 0.0) / length
    wide = max(least[WIDE, length] - least[WIDE, 0], one * length) / length
    per_node = (wide - one) / (WIDE - 1)
    return CostCurve(points, max(one - per_node, 0.0), per_node)


def pick_threads(device: TorchDevice) -> int:
    """Keep torch's threads if they make a step of one node quicker than one thread does.

    For a tiny model they never do, and where other programs keep the cores busy, waiting for each
    other costs threads many times what they gain. Compiled models choose by themselves, at every
    step; they only take torch's threads away. Returns the number now in force.
    """
    threads = torch.get_num_threads()
    model = device.model
    if isinstance(model, NativeTransformer):
        # Its threads are its own. Torch's would still be spinning for their next work when these
        # want the cores, and what is left to torch is small.
        torch.set_num_threads(1)
        return model.threads  # it finds out by itself, step by step, whether to use them
    if device.pool.device.type != "cpu" or threads == 1:
        return threads
    together = quickest(device, 1)
    torch.set_num_threads(1)
    if quickest(device, 1) > together:
        torch.set_num_threads(threads)
    return torch.get_num_threads()


def size_store(
    specs: tuple[KVSpec, ...], device: torch.device, share: float, most: int, kept: int = 0
) -> int:
    """Slots that fit into `share` of the memory that is free and not among the `kept` bytes, which
    steps will need; at most `most`."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
    else:
        free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        try:
            with open("/proc/meminfo") as lines:
                for line in lines:
                    if line.startswith("MemAvailable:"):
                        free = int(line.split()[1]) * 1024
        except OSError:
            pass
    room = int(max(free - HELD_BACK - kept, 0) * share)
    slots = min(room // max(bytes_per_slot(specs), 1), most)
    if slots < min(64, most):
        raise ValueError(
            f"kv-fraction: only {slots} tokens fit into {room >> 20} MiB; raise it or free memory"
        )
    return int(slots)
