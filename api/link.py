"""Between the event loop and the engine: requests go in, each step's events come back in one hop.

`EngineLink` is what transports see; `ThreadLink` runs the engine in a thread of its own beside the
loop (torch releases the GIL inside its operations). An engine in a process of its own is behind
process_link.py's. `Ledger` is what both keep of requests under way. Knows nothing of text.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import sys
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Protocol

from spec_serve.api.engine_thread import EngineThread
from spec_serve.cache.blocks import BlockLog, Change
from spec_serve.spec.admission import EngineInfo, Limits
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
NOTHING, AT_ONCE = Usage(0, 0, 0), RequestTimings(0, 0, 0, 0)


class Runs(Protocol):
    """What a link needs of an engine: spec/engine.py has it, and so have the fakes of tests."""

    info: EngineInfo
    limits: Limits

    def validate(self, request: Request) -> None: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> None: ...

    def run(self, publish: Callable[[list[Event]], None]) -> None: ...

    def drain(self) -> None: ...

    def stop(self) -> None: ...

    def idle(self) -> bool: ...

    def stats(self) -> EngineStats: ...

    def flush(self) -> Future[int]: ...

    @property
    def blocks(self) -> BlockLog | None: ...


Observer = Callable[[list[Event]], None]
CacheObserver = Callable[[list[Change]], None]


class EngineLink(Protocol):
    """An engine as the loop sees it. Events go to `Request.sink`, called in the loop's thread.

    All methods but `validate` belong to that thread.
    """

    info: EngineInfo
    observers: list[Observer]  # told all events of a step after their sinks, for metrics
    cache_observers: list[CacheObserver]  # told what changes in the cache, if the engine logs it

    @property
    def alive(self) -> bool:
        """Whether requests can be served now; an engine that is being restarted is not alive."""
        ...

    @property
    def restarting(self) -> bool:
        """Whether the engine ended by itself and another one is on its way."""
        ...

    def start(self) -> None:
        """Begin to step; called in the loop that events shall come to."""
        ...

    async def stop(self, within_s: float = 10.0) -> bool:
        """End the engine after the step in progress; False if it did not end in time."""
        ...

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

    def cancel_all(self) -> None:
        """End everything that runs or waits."""
        ...

    def drain(self) -> None:
        """Take no new requests; those running and waiting finish."""
        ...

    async def flush(self) -> int:
        """Drop from the prefix cache, between two steps, what no running request stands on.

        Returns the tokens dropped. RequestError if the engine is not running."""
        ...

    def idle(self) -> bool:
        """True when nothing runs or waits and every event has been handed to its sink."""
        ...

    def stats(self) -> EngineStats: ...


def tell_all(observers: list[CacheObserver], changes: list[Change]) -> None:
    """Tell every observer; one that fails costs the others nothing."""
    for observe in observers:
        try:
            observe(changes)
        except Exception:
            log.exception("an observer of the cache failed")


class Ledger:
    """Requests under way, and who hears of them. cancel: ends a request whose sink fails."""

    def __init__(self, cancel: Callable[[str], None]) -> None:
        self._cancel = cancel
        self._live: dict[str, tuple[Request, list[bool]]] = {}  # id -> which choices are over
        self.choices = 0  # under way
        self.observers: list[Observer] = []

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._live

    def __len__(self) -> int:
        return len(self._live)

    def ids(self) -> list[str]:
        """Of all requests under way."""
        return list(self._live)

    def add(self, request: Request) -> None:
        """RequestError if one of that id is under way."""
        if request.id in self._live:
            raise RequestError("id", f"a request {request.id!r} is already running", "duplicate_id")
        self._live[request.id] = request, [False] * max(request.n, 1)
        self.choices += max(request.n, 1)

    def forget(self, request_id: str) -> None:
        """The request is over, whatever was told of it."""
        if (entry := self._live.pop(request_id, None)) is not None:
            self.choices -= entry[1].count(False)

    def deliver(self, events: list[Event]) -> None:
        """Hand events to their requests' sinks; the last one of a request ends it."""
        for event in events:
            request = event.request
            if type(event) is Finished and (entry := self._live.get(request.id)) is not None:
                over = entry[1]
                if not over[event.index]:
                    over[event.index] = True
                    self.choices -= 1
                if all(over):
                    self.forget(request.id)
            sink = request.sink
            if sink is not None:
                try:
                    sink(event)
                except Exception:
                    # One reader's trouble must not cost the others their events of this step.
                    log.exception("the sink of request %s failed", request.id)
                    self._cancel(request.id)
        for observe in self.observers:
            try:
                observe(events)
            except Exception:
                log.exception("an observer of events failed")

    def fail(self, error: RequestError) -> None:
        """End everything that is under way with this error."""
        lost: list[Event] = [
            Finished(request, index, "error", None, NOTHING, AT_ONCE, error)
            for request, over in self._live.values()
            for index, done in enumerate(over)
            if not done
        ]
        self.deliver(lost)


@cache
def host_froze() -> bool:
    """Whether the host had frozen its objects before the first link of this process.

    Then it is left so: thawing can't tell ours from its own. Asked once, as counting walks all.
    """
    return gc.get_freeze_count() > 0


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
        self._engine = engine
        self._on_death = on_death
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = thread or EngineThread()
        self._started = False
        self._ledger = Ledger(engine.cancel)
        self.observers = self._ledger.observers
        self.cache_observers: list[CacheObserver] = []
        self._dead = False
        self._interval = 0.0

    @property
    def alive(self) -> bool:
        return self._loop is not None and not self._dead

    @property
    def restarting(self) -> bool:
        """Never: this engine ends with the server."""
        return False

    def start(self) -> None:
        """See EngineLink."""
        self._loop = asyncio.get_running_loop()
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_INTERVAL)
        # Weights, tables and modules live as long as the process: never walk them again.
        if not host_froze():
            gc.collect()
            gc.freeze()
        self._started = True
        if self._engine.blocks is not None:
            self._engine.blocks.changed = self._cache_changed
        self._thread.begin(self._run)
        self._thread.close()

    async def stop(self, within_s: float = 10.0) -> bool:
        """See EngineLink."""
        self._engine.stop()
        ended = True
        if self._started:
            loop = asyncio.get_running_loop()
            # The last publish needs the loop, so the loop must not wait for the thread itself.
            ended = await loop.run_in_executor(None, self._thread.join, within_s)
            sys.setswitchinterval(self._interval)
            if not host_froze():
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
        self._ledger.add(request)
        try:
            self._engine.submit(request)
        except BaseException:
            self._ledger.forget(request.id)
            raise

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def runs(self, request_id: str) -> bool:
        return request_id in self._ledger

    def cancel_all(self) -> None:
        """See EngineLink."""
        for request_id in self._ledger.ids():
            self._engine.cancel(request_id)

    def drain(self) -> None:
        self._engine.drain()

    async def flush(self) -> int:
        """See EngineLink."""
        if not self.alive:
            raise RequestError("", "the engine is not running", "engine_error")
        return await asyncio.wrap_future(self._engine.flush())

    def idle(self) -> bool:
        return not len(self._ledger)

    def stats(self) -> EngineStats:
        return self._engine.stats()

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
            loop.call_soon_threadsafe(self._ledger.deliver, events)

    def _cache_changed(self) -> None:
        loop = self._loop
        assert loop is not None
        if not loop.is_closed():
            loop.call_soon_threadsafe(self._tell_cache)

    def _tell_cache(self) -> None:
        blocks = self._engine.blocks
        assert blocks is not None
        if changes := blocks.take():
            tell_all(self.cache_observers, changes)

    def _ended(self, failed: bool) -> None:
        self._dead = True
        if not failed:
            return
        error = RequestError("", "the engine stopped while serving this request", "engine_error")
        self._ledger.fail(error)
        if self._on_death is not None:
            self._on_death()
