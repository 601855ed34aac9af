"""Between the event loop and the engine: requests go in, each step's events come back in one hop.

`EngineLink` is what transports see; `ThreadLink` runs the engine in a thread of its own beside the
loop (torch releases the GIL inside its operations). An engine in a process of its own would be
another link. Knows nothing of text or sockets.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from typing import Protocol

from spec_serve.api.engine_thread import EngineThread
from spec_serve.spec.admission import EngineInfo
from spec_serve.spec.request import (
    Event,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Usage,
)
from spec_serve.spec.stats import EngineStats

log = logging.getLogger("spec_serve.link")

SWITCH_INTERVAL = 1e-4  # seconds: with Python's 5 ms the loop waits for the engine's Python


class Runs(Protocol):
    """What a link needs of an engine: spec/engine.py has it, and so have the fakes of tests."""

    info: EngineInfo

    def validate(self, request: Request) -> None: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def run(self, publish: Callable[[list[Event]], None]) -> None: ...

    def drain(self) -> None: ...

    def stop(self) -> None: ...

    def idle(self) -> bool: ...

    def stats(self) -> EngineStats: ...


Observer = Callable[[list[Event]], None]


class EngineLink(Protocol):
    """An engine as the loop sees it. Events go to `Request.sink`, called in the loop's thread."""

    info: EngineInfo
    observers: list[Observer]  # told all events of a step after their sinks, for metrics

    @property
    def alive(self) -> bool: ...

    def validate(self, request: Request) -> None:
        """Raises RequestError naming the field; from any thread, long for a long prompt."""
        ...

    def submit(self, request: Request) -> None:
        """Raises RequestError; never blocks."""
        ...

    def cancel(self, request_id: str) -> None:
        """Ends a request; its Finished still comes. Unknown ids are ignored."""
        ...

    def runs(self, request_id: str) -> bool:
        """Whether a request of this id runs or waits."""
        ...

    def drain(self) -> None: ...

    def idle(self) -> bool:
        """True when nothing runs or waits and every event has been handed to its sink."""
        ...

    def stats(self) -> EngineStats: ...


class ThreadLink:
    """The engine's own thread, best the one that loaded it (api/engine_thread.py says why).

    `on_death` is called in the loop if the engine ends by itself.
    """

    def __init__(
        self,
        engine: Runs,
        on_death: Callable[[], None] | None = None,
        thread: EngineThread | None = None,
    ) -> None:
        self.info = engine.info
        self.observers: list[Observer] = []
        self._engine = engine
        self._on_death = on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = thread or EngineThread()
        self._started = False
        self._live: dict[str, list[bool]] = {}  # id -> which choices are over
        self._requests: dict[str, Request] = {}
        self._dead = False
        self._interval = 0.0

    @property
    def alive(self) -> bool:
        return self._loop is not None and not self._dead

    def start(self) -> None:
        """Begin to step; called in the loop that events shall come to."""
        self._loop = asyncio.get_running_loop()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        # Weights, tables and modules live as long as the process: never walk them again.
        gc.collect()
        gc.freeze()
        self._started = True
        self._thread.begin(self._run)
        self._thread.close()

    async def stop(self, within_s: float = 10.0) -> bool:
        """End the engine after the step in progress; False if it did not end in time."""
        self._engine.stop()
        ended = True
        if self._started:
            loop = asyncio.get_running_loop()
            # The last publish needs the loop, so the loop must not wait for the thread itself.
            ended = await loop.run_in_executor(None, self._thread.join, within_s)
            sys.setswitchinterval(self._interval)
            gc.unfreeze()
        else:
            self._thread.close()
        await asyncio.sleep(0)
        return ended

    def validate(self, request: Request) -> None:
        self._engine.validate(request)

    def submit(self, request: Request) -> None:
        if not self.alive:
            raise RequestError("", "the engine is not running", "engine_error")
        if request.id in self._live:
            raise RequestError("id", f"a request {request.id!r} is already running", "duplicate_id")
        self._live[request.id] = [False] * max(request.n, 1)
        self._requests[request.id] = request
        try:
            self._engine.submit(request)
        except BaseException:
            self._forget(request.id)
            raise

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def runs(self, request_id: str) -> bool:
        return request_id in self._live

    def cancel_all(self) -> None:
        """End everything that runs or waits."""
        for request_id in list(self._live):
            self._engine.cancel(request_id)

    def drain(self) -> None:
        self._engine.drain()

    def idle(self) -> bool:
        return not self._live

    def stats(self) -> EngineStats:
        return self._engine.stats()

    def _forget(self, request_id: str) -> None:
        self._live.pop(request_id, None)
        self._requests.pop(request_id, None)

    def _run(self) -> None:
        failed = False
        try:
            self._engine.run(self._publish)
        except Exception:
            failed = True
            log.exception("the engine stopped")
        loop = self._loop
        assert loop is not None
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._ended, failed)

    def _publish(self, events: list[Event]) -> None:
        loop = self._loop
        assert loop is not None
        if events and not loop.is_closed():
            loop.call_soon_threadsafe(self._deliver, events)

    def _deliver(self, events: list[Event]) -> None:
        for event in events:
            request = event.request
            if type(event) is Finished:
                over = self._live.get(request.id)
                if over is not None:
                    over[event.index] = True
                    if all(over):
                        self._forget(request.id)
            if request.sink is not None:
                try:
                    request.sink(event)
                except Exception:
                    # One reader's trouble must not cost the others their events of this step.
                    log.exception("the sink of request %s failed", request.id)
                    self._engine.cancel(request.id)
        for observe in self.observers:
            try:
                observe(events)
            except Exception:
                log.exception("an observer of events failed")

    def _ended(self, failed: bool) -> None:
        self._dead = True
        if not failed:
            return
        error = RequestError("", "the engine stopped while serving this request", "engine_error")
        lost: list[Event] = [
            Finished(
                self._requests[request_id], index, "error", None,
                Usage(0, 0, 0), RequestTimings(0, 0, 0, 0), error,
            )
            for request_id, over in list(self._live.items())
            for index, done in enumerate(over)
            if not done
        ]  # fmt: skip
        self._deliver(lost)
        if self._on_death is not None:
            self._on_death()
