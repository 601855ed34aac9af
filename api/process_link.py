"""The engine in a process of its own, as the event loop sees it: one frame per step over a socket.

A killed engine costs the requests it served, nothing else: they end with an error that may be tried
again, the process is started anew, and meanwhile the link is not alive. After MOST_DEATHS within
WITHIN_S it stays dead. One that hangs is killed. Knows neither text nor transports.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import fields
from time import monotonic

from spec_serve.api import process_messages as p
from spec_serve.api.engine_thread import EngineThread
from spec_serve.api.link import CacheObserver, EngineLink, Ledger, Runs, ThreadLink, tell_all
from spec_serve.api.process_channel import LoopChannel
from spec_serve.api.process_child import Child, EngineProcess
from spec_serve.cache.blocks import Cleared
from spec_serve.spec.admission import check_request
from spec_serve.spec.request import Event, Finished, Request, RequestError
from spec_serve.spec.stats import EngineStats

log = logging.getLogger("spec_serve.link")

MOST_DEATHS, WITHIN_S = 5, 300.0
FIRST_PAUSE_S = 0.5  # before the second start within WITHIN_S; doubled for each further one
RETRY_MS = 2000
LOOKS = 8  # at an engine without a sign of life, before it counts as hung
GAUGES = frozenset({"running", "waiting", "kv_used", "kv_total"})


def _restarting() -> RequestError:
    error = RequestError("", "the engine ended and is restarting; try again", "engine_error")
    error.retry_after_ms = RETRY_MS
    return error


class ProcessLink:
    """See EngineLink. on_death: called in the loop when the engine is given up.

    hang_s: how long a loaded engine may be silent, or busy without ending a step, 0 = for ever.
    """

    def __init__(
        self,
        engine: EngineProcess,
        on_death: Callable[[], None] | None = None,
        hang_s: float = 0.0,
    ) -> None:
        self.info, self._limits = engine.info, engine.limits
        self._engine, self._on_death, self._hang_s = engine, on_death, hang_s
        self._looks = 0  # since the last sign of life
        self._watch: asyncio.TimerHandle | None = None
        self._ledger = Ledger(self.cancel)
        self.observers = self._ledger.observers
        self.cache_observers: list[CacheObserver] = []
        self._child: Child | None = engine.child
        self._channel: LoopChannel | None = None
        self._ready = self._dead = self._draining = False
        self._stopping = asyncio.Event()
        self._gone = asyncio.Event()  # the channel has reached its end
        self._restart: asyncio.Task[None] | None = None
        self._deaths: deque[float] = deque(maxlen=MOST_DEATHS)  # when, in monotonic seconds
        self._number = 0  # of the newest request or flush; never used twice
        self._requests: dict[int, Request] = {}
        self._numbers: dict[str, int] = {}
        self._unseen: deque[tuple[int, int]] = deque()  # (number, choices) the counters don't know
        self._flushes: dict[int, asyncio.Future[int]] = {}
        self._stats = EngineStats(kv_total=engine.info.kv_tokens)
        self._before = EngineStats()  # what the processes before this one have counted

    @property
    def alive(self) -> bool:
        return self._ready and not self._stopping.is_set()

    @property
    def restarting(self) -> bool:
        """See EngineLink."""
        over = self._ready or self._dead or self._stopping.is_set()
        return bool(self._deaths) and not over

    def start(self) -> None:
        """See EngineLink."""
        assert self._child is not None and self._channel is None
        self._attach(self._child)
        self._ready = True
        self._look()

    async def stop(self, within_s: float = 10.0) -> bool:
        """See EngineLink."""
        self._stopping.set()
        if self._watch is not None:
            self._watch.cancel()
        loop = asyncio.get_running_loop()
        if self._restart is not None:
            await self._restart
        if self._child is None:
            return True
        ended = True
        if self._channel is not None:
            self._post(p.Stop())
            try:
                await asyncio.wait_for(self._gone.wait(), within_s)
            except TimeoutError:
                ended = False
                self._channel.close()
        else:
            self._child.channel.sock.close()
        how = await loop.run_in_executor(None, self._child.ended, 5.0 if ended else 0.0)
        log.debug("the engine's process has ended: %s", how)
        self._child = None
        self._ready = False
        self._lose(RequestError("", "the engine is not running", "engine_error"))
        return ended

    # ---- requests

    def validate(self, request: Request) -> None:
        check_request(request, self.info, self._limits)

    def submit(self, request: Request) -> None:
        if not self.alive:
            if self.restarting:
                raise _restarting()
            raise RequestError("", "the engine is not running", "engine_error")
        self.validate(request)
        if self._draining:
            raise RequestError("", "the server is shutting down", "draining")
        if self._ledger.choices + request.n > self._limits.max_waiting + self.info.max_rows:
            raise RequestError("", "too many requests are waiting", "overloaded")
        number = self._number + 1
        try:
            payload = p.encode(p.to_submit(number, request))
        except UnicodeEncodeError:
            raise RequestError("", "a text holds half a surrogate pair") from None
        self._ledger.add(request)
        self._number = number
        self._requests[number] = request
        self._numbers[request.id] = number
        self._unseen.append((number, request.n))
        assert self._channel is not None
        self._channel.post(payload)

    def cancel(self, request_id: str) -> None:
        if (number := self._numbers.get(request_id)) is not None:
            self._post(p.Cancel(number))

    def runs(self, request_id: str) -> bool:
        return request_id in self._ledger

    def cancel_all(self) -> None:
        """See EngineLink."""
        for request_id in self._ledger.ids():
            self.cancel(request_id)

    def drain(self) -> None:
        self._draining = True
        if self._ready:  # one that loads is told when it has loaded: all but the end would end it
            self._post(p.Drain())

    async def flush(self) -> int:
        """See EngineLink."""
        if not self.alive:
            raise RequestError("", "the engine is not running", "engine_error")
        self._number += 1
        number = self._number
        asked = self._flushes[number] = asyncio.get_running_loop().create_future()
        self._post(p.Flush(number))
        try:
            tokens: int = await asked
        finally:
            self._flushes.pop(number, None)
        return tokens

    def idle(self) -> bool:
        return not len(self._ledger)

    def stats(self) -> EngineStats:
        """The counters, of a busy engine some 20 ms old."""
        stats = self._stats.copy()
        stats.waiting += sum(choices for _, choices in self._unseen)
        _add(stats, self._before)
        return stats

    # ---- the channel

    def _attach(self, child: Child) -> None:
        self._child = child
        self._gone.clear()
        loop = asyncio.get_running_loop()
        self._channel = LoopChannel(child.channel, loop, self._took, self._lost)

    def _post(self, message: p.ToEngine) -> None:
        if self._channel is not None:
            self._channel.post(p.encode(message))

    def _took(self, payload: bytes) -> None:
        match p.for_server(payload):
            case p.Step(events, seen, stats):
                self._step(events, seen, stats)
            case p.Flushed(number, tokens):
                asked = self._flushes.get(number)
                if asked is not None and not asked.done():
                    asked.set_result(tokens)
            case p.Ready(info, limits):
                self.info, self._limits = info, limits
                self._ready = True
                self._looks = 0
                log.warning("the engine is back")
                if self._draining:
                    self._post(p.Drain())
            case p.Failed(message):
                log.error("the engine can't be loaded again: %s", message)
            case p.CacheChanged(blocks):
                tell_all(self.cache_observers, p.from_blocks(blocks))
            case p.Loading():
                pass

    def _step(self, told: list[p.Told], seen: int, stats: EngineStats | None) -> None:
        if stats is not None:
            # What is busy with a step that never ends tells its counters all the same.
            idle = not (stats.running or stats.waiting)
            if told or idle or stats.steps != self._stats.steps:
                self._looks = 0
            self._stats = stats
            unseen = self._unseen
            while unseen and unseen[0][0] <= seen:
                unseen.popleft()
        events: list[Event] = []
        for one in told:
            request = self._requests.get(one.number)
            if request is not None:
                events.append(p.from_told(one, request))
        if not events:
            return
        self._ledger.deliver(events)
        for event in events:
            if type(event) is Finished and event.request.id not in self._ledger:
                self._forget(event.request)

    def _forget(self, request: Request) -> None:
        number = self._numbers.get(request.id)
        if number is not None and self._requests.get(number) is request:
            del self._numbers[request.id], self._requests[number]

    def _look(self) -> None:
        """Whether the engine makes progress.

        Looks are counted instead of seconds: a machine that was asleep has not looked.
        """
        if self._hang_s:
            self._watch = asyncio.get_running_loop().call_later(self._hang_s / LOOKS, self._look)
        if not self._ready:  # loading takes as long as it takes
            self._looks = 0
            return
        self._looks += 1
        if self._looks > LOOKS and self._channel is not None and self._child is not None:
            log.error("the engine made no progress for %g s: it is killed", self._hang_s)
            self._child.kill()
            self._channel.close()
            self._lost()

    # ---- its end

    def _lost(self) -> None:
        self._gone.set()
        self._channel = None
        self._ready = False
        if self._stopping.is_set():
            return
        now = monotonic()
        self._deaths.append(now)
        often = len(self._deaths) == MOST_DEATHS and now - self._deaths[0] < WITHIN_S
        self._dead = often or self._draining
        assert self._child is not None
        self._restart = asyncio.get_running_loop().create_task(self._again(self._child))
        if self._dead:
            self._lose(RequestError("", "the engine ended", "engine_error"))
        else:
            self._lose(_restarting())

    def _lose(self, error: RequestError) -> None:
        """End everything under way, and begin to count anew."""
        self._requests.clear()
        self._numbers.clear()
        self._unseen.clear()
        for asked in self._flushes.values():
            if not asked.done():
                asked.set_exception(error)
        _add(self._before, self._stats)
        self._stats = EngineStats(kv_total=self.info.kv_tokens)
        tell_all(self.cache_observers, [Cleared()])
        self._ledger.fail(error)

    async def _again(self, child: Child) -> None:
        """Bury the process that ended and start the next, unless it has been too often."""
        loop = asyncio.get_running_loop()
        how = await loop.run_in_executor(None, child.ended, 5.0)
        log.error("the engine's process ended by itself: %s", how)
        self._child = None
        since = monotonic() - WITHIN_S
        deaths = sum(death > since for death in self._deaths)
        pause = FIRST_PAUSE_S * 2.0 ** (deaths - 2) if deaths > 1 else 0.0
        while not self._dead and not self._stopping.is_set():
            if pause:
                try:
                    await asyncio.wait_for(self._stopping.wait(), pause)
                    return
                except TimeoutError:
                    pass
            try:
                following = await loop.run_in_executor(None, self._engine.start)
                following.channel.send(p.encode(self._engine.load))  # a few bytes: never blocks
            except OSError as error:
                log.error("no process for the engine: %s", error)
                pause = FIRST_PAUSE_S * 2**MOST_DEATHS
                continue
            self._attach(following)
            return
        if self._dead:
            log.error("the engine is not started again")
            if self._on_death is not None:
                self._on_death()


def _add(to: EngineStats, other: EngineStats) -> None:
    """Add the counters of `other`; gauges are of the moment."""
    for field in fields(EngineStats):
        if field.name not in GAUGES:
            setattr(to, field.name, getattr(to, field.name) + getattr(other, field.name))


def link_to(
    engine: Runs | EngineProcess,
    on_death: Callable[[], None],
    thread: EngineThread | None = None,
    hang_s: float = 0.0,
) -> EngineLink:
    """The link for an engine in this process, to be stepped in `thread`, or in one of its own."""
    if isinstance(engine, EngineProcess):
        return ProcessLink(engine, on_death, hang_s)
    return ThreadLink(engine, on_death, thread)
