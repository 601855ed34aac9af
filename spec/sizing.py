"""What this machine can do: step times over nodes, threads that pay, memory for the K/V store.

Measured once at start, before any request. Knows the device half and numbers; no requests.
"""

from __future__ import annotations

import os
from time import perf_counter

import torch

from spec_serve.cache.batch import Twig
from spec_serve.cache.pool import KVSpec, bytes_per_slot
from spec_serve.cache.tree import chain
from spec_serve.draft.budget import CostCurve
from spec_serve.spec.request import Sampling
from spec_serve.spec.sampling import RowSampling
from spec_serve.spec.step import Job, TorchDevice
from spec_serve.target.native import NativeTransformer

HELD_BACK = 64 << 20  # bytes never given to the K/V store when it is sized by what is free


def quickest(device: TorchDevice, n: int, most: int = 6, seconds: float = 0.3) -> float:
    """Milliseconds of the quickest of several steps over a chain of n nodes.

    The quickest, because other work on the machine only ever makes a step slower.
    """
    state = RowSampling(Sampling(), 0, device.model.config.vocab, [1], 0, frozenset())
    twig = Twig(0, 0, chain([1] * n, given=1), range(1, n + 1), 0)
    job = Job([twig], [state], [0], [-1], n - 1)
    device.step(job)
    times: list[float] = []
    while len(times) < 2 or (len(times) < most and sum(times) < seconds):
        begun = perf_counter()
        device.step(job)
        times.append(perf_counter() - begun)
    return min(times) * 1e3


def measure(device: TorchDevice, sizes: list[int]) -> CostCurve:
    """The cost of a step over n nodes, for each n of `sizes` (ascending)."""
    points: list[tuple[int, float]] = []
    for n in sizes:
        points.append((n, max(quickest(device, n), points[-1][1] if points else 0.0)))
    return CostCurve(points)


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


def size_store(specs: tuple[KVSpec, ...], device: torch.device, share: float, most: int) -> int:
    """Slots that fit into `share` of the free memory, at most `most`."""
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
    room = int(max(free - HELD_BACK, 0) * share)
    slots = min(room // max(bytes_per_slot(specs), 1), most)
    if slots < min(64, most):
        raise ValueError(
            f"kv-fraction: only {slots} tokens fit into {room >> 20} MiB; raise it or free memory"
        )
    return int(slots)
