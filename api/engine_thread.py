"""The one thread that computes: it loads the model and then steps the engine.

OpenMP gives every thread that computes a pool of workers of its own, and as soon as the pools
together have more threads than there are cores, waiting workers sleep instead of spinning: steps in
a second thread took 39 ms instead of 30. So whoever loads in this thread and steps in it pays for
one pool only. Knows neither engines nor loops.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")
Work = tuple[Callable[[], Any], Future[Any]]


class EngineThread:
    """Runs what it is given, one thing after the other. A daemon thread."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Work | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._thread.start()

    def begin(self, work: Callable[[], T]) -> Future[T]:
        """Queue `work`; its result or exception arrives in the future."""
        future: Future[T] = Future()
        self._work.put((work, future))
        return future

    def close(self) -> None:
        """End the thread after what is queued."""
        self._work.put(None)

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end; True if it has come."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        while (entry := self._work.get()) is not None:
            work, future = entry
            try:
                future.set_result(work())
            except BaseException as error:
                future.set_exception(error)
