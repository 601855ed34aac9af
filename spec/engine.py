"""Host half of the engine: the one loop everything runs through.

A step picks rows, builds one job, lets the device run it and commits what was verified: to the
cache, to the rows, to the outside. Requests and cancellations come in from any thread; everything
else happens in the one thread that calls `step`. How guesses are made or verified isn't known here.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import replace
from time import monotonic, perf_counter

from spec_serve.cache.store import KVStore
from spec_serve.spec import report
from spec_serve.spec.admission import EngineInfo, Limits, check_request
from spec_serve.spec.build import Builder
from spec_serve.spec.commit import commit_row
from spec_serve.spec.compiler import Compiler, compile_for
from spec_serve.spec.completion import Completion, collect
from spec_serve.spec.request import Event, Finished, Reason, Request, RequestError, Started
from spec_serve.spec.row import Row, make_rows
from spec_serve.spec.scheduler import Scheduler
from spec_serve.spec.segments import following
from spec_serve.spec.stats import EngineStats
from spec_serve.spec.step import Device, Job, Result

log = logging.getLogger("spec_serve.engine")

FAILED = "the engine failed while serving this request"


class Engine:
    """Serves requests on one device. `info` says what it is; see the methods for its threads."""

    def __init__(
        self,
        info: EngineInfo,
        limits: Limits,
        device: Device,
        store: KVStore,
        scheduler: Scheduler,
        builder: Builder,
        compiler: Compiler | None = None,
    ) -> None:
        self.info = info
        self.limits = limits
        self.store = store
        self.blocks = store.tree.log  # for one reader of what changes in the cache
        self.scheduler = scheduler
        self.builder = builder
        self._device = device
        self._compiler = compiler
        self._wake = threading.Condition()
        self._inbox: dict[str, list[Row]] = {}
        self._cancels: set[str] = set()
        self._flushes: list[Future[int]] = []
        self._live: dict[str, list[Row]] = {}
        self._pending = 0  # choices submitted and not finished, for the queue limit
        self._draining = False
        self._stopped = False
        self._order = 0
        self._events: list[Event] = []
        self._timed: set[Row] = set()
        self._suspects: list[Row] = []  # rows of a failed step, to be run one by one
        self._stats = EngineStats(kv_total=store.total)

    # ---- from any thread

    def validate(self, request: Request) -> None:
        """Raise RequestError naming the field if the request can't be served as asked.

        Compiles its constraint, which may take a second.
        """
        check_request(request, self.info, self.limits)
        compile_for(request, self._compiler)

    def submit(self, request: Request) -> None:
        """Queue a request. Raises RequestError at once if it is bad, or the engine full.

        What else fails (the factory of its watch) is raised here too and leaves no trace.
        """
        self.validate(request)
        with self._wake:
            if self._draining or self._stopped:
                raise RequestError("", "the server is shutting down", "draining")
            if not self._has_room(request.n):
                raise RequestError("", "too many requests are waiting", "overloaded")
            if self._known(request.id):
                raise RequestError("id", f"a request {request.id!r} is already running")
            rows = make_rows(request, self.info, monotonic(), self._order)
            self._inbox[request.id] = rows
            self._order += request.n
            self._pending += request.n
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        """End a request by the next step; unknown ids are ignored."""
        with self._wake:
            if self._known(request_id):
                self._cancels.add(request_id)
                self._wake.notify()

    def _known(self, request_id: str) -> bool:
        return request_id in self._live or request_id in self._inbox

    def drain(self) -> None:
        """Take no new requests; those running and waiting finish."""
        with self._wake:
            self._draining = True
            self._wake.notify()

    def stop(self) -> None:
        """End `run` after the step in progress."""
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def flush(self) -> Future[int]:
        """Drop from the prefix cache, between two steps, all that no running row stands on.

        The future holds the tokens dropped: 0 once the engine has stopped."""
        asked: Future[int] = Future()
        with self._wake:
            if self._stopped:
                asked.set_result(0)
            else:
                self._flushes.append(asked)
                self._wake.notify()
        return asked

    def idle(self) -> bool:
        """True if nothing runs, waits or is on its way in."""
        with self._wake:
            return not self._pending

    def stats(self) -> EngineStats:
        """A copy of the counters."""
        stats = self._stats.copy()
        stats.running = len(self.scheduler.running)
        with self._wake:
            arriving = sum(map(len, self._inbox.values()))
        stats.waiting = len(self.scheduler.waiting) + arriving
        stats.kv_used = self.store.total - self.store.available()
        return stats

    # ---- the engine's own thread

    def run(self, publish: Callable[[list[Event]], None]) -> None:
        """Step until `stop`; hand all events of a step to `publish` at once."""
        while True:
            with self._wake:
                while not (
                    self._inbox or self._cancels or self._flushes
                    or self._live or self._events or self._stopped
                ):  # fmt: skip
                    self._wake.wait()
                if self._stopped:
                    break
            events = self.step()
            if events:
                self._hand(publish, events)
            elif not self.scheduler.running and self.scheduler.waiting:
                with self._wake:  # waiting for a leader or for room: nothing can change by itself
                    self._wake.wait(0.005)
        self._intake()
        with self._wake:
            self._cancels |= set(self._live)
        self._intake()
        publish(self._take())

    def _hand(self, publish: Callable[[list[Event]], None], events: list[Event]) -> None:
        """Publish; events that can't be end their requests. Raises what fails a second time."""
        try:
            publish(events)
            return
        except Exception:
            log.exception("the events of a step were lost")
        for request in {event.request.id: event.request for event in events}.values():
            for row in list(self._live.get(request.id, ())):
                self._fail(row)
        error = RequestError("", FAILED, "engine_error")
        for event in events:
            if isinstance(event, Finished):
                self._events.append(replace(event, reason="error", matched=None, error=error))
        publish(self._take())

    def generate(self, requests: Sequence[Request]) -> list[Completion]:
        """Run requests to their end in the calling thread, one Completion per choice in order.

        Raises RequestError before anything runs if one of them can't be served.
        """
        for request in requests:
            self.validate(request)
        events: list[Event] = []
        left = deque(requests)
        while left or not self.idle():
            while left and (self._has_room(left[0].n) or self.idle()):
                self.submit(left.popleft())
            events += self.step()
        return collect(requests, events)

    def _has_room(self, choices: int) -> bool:
        return self._pending + choices <= self.limits.max_waiting + self.info.max_rows

    def step(self) -> list[Event]:
        """One step: intake, one device step over all picked rows, commit. Returns the events."""
        begun = perf_counter()
        self._intake()
        self._admit()
        try:
            job, rows = self._build()
            if not rows:
                return self._take()
            built = perf_counter()
            result = self._device.step(job)
        except Exception:
            log.exception("a step failed")
            self._step_failed()
            return self._take()
        if self._suspects:
            self._suspects.pop()  # it ran alone, and well
        ran = perf_counter()
        self._stats.host_us += int((built - begun) * 1e6)
        self._commit(rows, job, result, int((built - begun) * 1e6))
        try:
            self.builder.observe(job, result)
        except Exception:
            log.exception("what a step cost was not learnt")
        self._stats.steps += 1
        self._stats.host_us += int((perf_counter() - ran) * 1e6)
        return self._take()

    # ---- parts of a step

    def _take(self) -> list[Event]:
        events, self._events = self._events, []
        return events

    def _intake(self) -> None:
        """Turn new requests into waiting rows; end cancelled and overdue ones; flush."""
        if self._inbox or self._cancels or self._flushes:
            with self._wake:
                arrived, cancels, flushes = self._inbox, self._cancels, self._flushes
                self._live |= arrived
                self._inbox, self._cancels, self._flushes = {}, set(), []
            self._stats.requests += len(arrived)
            for rows in arrived.values():
                self.scheduler.waiting += rows
                if rows[0].request.deadline is not None:
                    self._timed |= set(rows)
            for request_id in cancels:
                for row in list(self._live.get(request_id, ())):
                    self._stats.aborted += 1
                    self._finish(row, "cancelled", None)
            for asked in flushes:
                held = self.store.tree.size
                self.store.clear()
                asked.set_result(held - self.store.tree.size)
        if self._timed:
            now = monotonic()
            for row in [r for r in self._timed if (r.request.deadline or now) <= now]:
                error = RequestError("deadline", "the deadline has passed", "timeout")
                self._finish(row, "error", None, error)

    def _admit(self) -> None:
        """Move waiting rows into the cache while there is room for their prompts."""
        if not self.scheduler.waiting:
            return
        now = monotonic()
        while (row := self.scheduler.next_waiting(now)) is not None:
            try:
                if not self._open(row, now):
                    return
            except Exception:
                log.exception("request %r could not begin", row.request.id)
                self._fail(row)

    def _open(self, row: Row, now: float) -> bool:
        """Give a row its place in the cache; False if there is no room yet."""
        # Asked first, as opening touches what matches and makes look-ups.
        cached = self.store.matched(row.tokens, row.request.salt) if row.scored else 0
        running = self.scheduler.running
        if not self.builder.fits(row, cached, running):
            return False
        kv = self.builder.open(row)
        if kv is None:
            return False
        # What it matched can't be evicted any more.
        if not self.builder.fits(row, len(kv.tokens), running):
            self.store.close(kv)
            return False
        row.kv = kv
        if row.cached < 0:
            row.cached = len(kv.tokens) - row.replay
            row.admitted = now
            self._stats.prompt_tokens += row.prompt_len
            self._stats.prefix_hit_tokens += row.cached
            queued = (now - row.arrived) * 1e3
            self._events.append(Started(row.owner, row.index, row.cached, queued))
        self.scheduler.admit(row)
        return True

    def _pick(self) -> list[tuple[Row, int]]:
        """(row, given nodes) of the next step: one suspect alone, if there are any."""
        picked = self.scheduler.pick(monotonic())
        while self._suspects:
            alone = [entry for entry in picked if entry[0] is self._suspects[-1]]
            if alone:
                return alone
            self._suspects.pop()
        return picked

    def _build(self) -> tuple[Job, list[Row]]:
        """The next job; preempts rows, youngest first, while there are not enough slots."""
        while True:
            job, rows, starved = self.builder.build(self._pick())
            if starved is None:
                return job, rows
            self.builder.undo(rows)
            victim = self.scheduler.youngest()
            if victim is starved and len(self.scheduler.running) == 1:
                error = RequestError("", "the KV store is too small for this request", "overloaded")
                self._finish(starved, "error", None, error)
                continue
            self._stats.preempted += 1
            self.builder.release(victim)
            self.scheduler.put_back(victim)

    def _commit(self, rows: list[Row], job: Job, result: Result, host_us: int) -> None:
        """Take over what the step found. What fails here costs the request it fails for only."""
        now = monotonic()
        for b, row in enumerate(rows):
            try:
                self._commit_row(row, b, job, result, now, host_us)
            except Exception:
                log.exception("request %r failed", row.request.id)
                self._fail(row)

    def _commit_row(
        self, row: Row, b: int, job: Job, result: Result, now: float, host_us: int
    ) -> None:
        tell = self._events.append
        ended = commit_row(row, b, job, result, self.builder, self._stats, tell, now, host_us)
        if ended is not None:
            after = following(row, *ended, self.info)
            if after is None:
                self._finish(row, *ended)
            else:
                self._follow(row, after, *ended)
        elif job.next_tokens[b] < 0 and not row.shared:
            self.builder.share(row)

    def _follow(self, row: Row, after: Row, reason: Reason, matched: int | str | None) -> None:
        """Have the next segment of a request take a row's place."""
        self._events.append(report.segment_finished(row, reason, matched))
        self.builder.release(row)
        self.scheduler.retire(row)
        self.scheduler.waiting.insert(0, after)
        live = self._live[row.request.id]
        live[live.index(row)] = after
        if row in self._timed:
            self._timed.remove(row)
            self._timed.add(after)

    def _finish(
        self,
        row: Row,
        reason: Reason,
        matched: int | str | None,
        error: RequestError | None = None,
    ) -> None:
        """End a choice: its cache place, its waiting place, its last event."""
        try:
            self.builder.retire(row)
        except Exception:
            log.exception("the cache place of request %r is lost", row.request.id)
            row.kv = None
        self.scheduler.retire(row)
        self._timed.discard(row)
        for other in self.scheduler.waiting:
            if other.leader is row:
                other.leader = None
        request = row.request
        live = self._live[request.id]
        live.remove(row)
        with self._wake:
            if not live:
                del self._live[request.id]
                self._cancels.discard(request.id)  # not meant for a later request of that name
            self._pending -= 1
        self._stats.finished += 1
        self._events.append(report.finished(row, reason, matched, error))

    def _step_failed(self) -> None:
        """Find who is to blame: rows run alone next, and the one that fails alone is dropped."""
        running = self.scheduler.running
        self.builder.undo(running)
        for row in running:
            row.device_tree = None  # guesses may be the cause, and cost nothing to lose
        suspects = self._suspects or list(running)
        if len(suspects) == 1 or self._suspects:
            self._fail(suspects.pop())
        self._suspects = [row for row in suspects if row in running]

    def _fail(self, row: Row) -> None:
        error = RequestError("", FAILED, "engine_error")
        self._finish(row, "error", None, error)
