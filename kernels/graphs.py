"""Work on a GPU recorded once and repeated by one call: CUDA graphs, and what steps need beside.

A graph repeats launches at the addresses they had. So whoever records keeps inputs and outputs in
tensors of his own that stay where they are, and the work neither waits for the device nor asks it
anything. `Capture` is the seam: tests put a recorder in its place that checks just that. Knows
streams, events and memory; no models, no steps.
"""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any, Protocol

import torch
from torch import Tensor

Work = Callable[[], None]

WARM = 2
"""Runs before recording: programs are compiled, tiles tuned and libraries set up in them."""


class Capture(Protocol):
    """Records work."""

    def record(self, work: Work) -> Work:
        """Run `work`, maybe several times, and return what repeats it.

        work: reads and writes tensors that outlive what is returned, at addresses that stay; what
        it allocates is reused by other recordings, so it must leave nothing behind but in those.
        """
        ...


class CudaCapture:
    """CUDA graphs of one device; all share one pool of memory, as they run one after the other."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        stream: Callable[..., Any] = torch.cuda.Stream
        self._stream = stream(device)
        self._pool: Any = torch.cuda.graph_pool_handle()

    def record(self, work: Work) -> Work:
        """See `Capture`; RuntimeError if CUDA refuses something that `work` does."""
        here = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM):
                work()
        here.wait_stream(self._stream)
        torch.cuda.synchronize(self._device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            work()

        def replay() -> None:
            graph.replay()

        return replay


def staging(size: int, device: torch.device) -> Tensor:
    """[size] int64 zeros on the host, in memory that a device reads without the host waiting."""
    return torch.zeros(size, dtype=torch.int64, pin_memory=device.type == "cuda")


def fetch(packed: Tensor) -> Tensor:
    """A tensor on the host: the one wait of a step, for just what was queued until now."""
    if packed.device.type != "cuda":
        return packed.cpu()
    host = torch.empty(packed.shape, dtype=packed.dtype, pin_memory=True)
    host.copy_(packed, non_blocking=True)
    event: Callable[..., Any] = torch.cuda.Event
    done = event()
    done.record()
    done.synchronize()
    return host


class Watch:
    """When a device passed each mark: events on a GPU, where the host runs ahead, else the clock.

    Read it after `fetch` only: then all marks before it are passed.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._marks: list[Any] = []

    def mark(self) -> None:
        """Now."""
        if not self._cuda:
            self._marks.append(perf_counter())
            return
        event: Callable[..., Any] = torch.cuda.Event
        made = event(enable_timing=True)
        made.record()
        self._marks.append(made)

    def us(self, first: int, last: int) -> int:
        """Microseconds between two marks, by their numbers."""
        a, b = self._marks[first], self._marks[last]
        return int(a.elapsed_time(b) * 1e3) if self._cuda else int((b - a) * 1e6)
