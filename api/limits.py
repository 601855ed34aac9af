"""How much may run and wait: in all, and for each key; and how long a first token may take.

`Admission` is asked twice: before a text is read, with an estimate of its tokens, so that what has
no room is refused at once, and exactly when it is submitted. `Held` follows one request by its
events. All in the loop's thread. Knows no transport and no engine beyond its events.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from spec_serve.api.auth import Principal
from spec_serve.spec.request import (
    Delta,
    Event,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Started,
    Usage,
)

CHARS_PER_TOKEN = 4  # ordinary text, for estimates
MINUTE = 60.0
BUSY_MS = 1000  # when to come back to a full server

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Bounds:
    """What may run and wait; 0 = no bound. See the settings of the same names.

    queue: choices that may wait beside those that run; queue_tokens: their prompts' tokens.
    parallel, requests and tokens are each key's own, the latter two per minute.
    """

    queue: int = 0
    queue_tokens: int = 0
    first_token_s: float = 0.0
    total_s: float = 0.0
    parallel: int = 0
    requests: int = 0
    tokens: int = 0


class Bucket:
    """A token bucket: `per_minute` flow in evenly, and at most as many are ever held."""

    def __init__(self, per_minute: int, clock: Clock = time.monotonic) -> None:
        self._size, self._clock = float(per_minute), clock
        self._level, self._seen = self._size, clock()

    def wait(self, amount: float) -> float:
        """Seconds until so many are there, 0.0 = now. More than all: until the bucket is full."""
        now = self._clock()
        # A clock that stands still or jumps back gives nothing and takes nothing.
        passed = max(0.0, now - self._seen)
        self._seen = now
        self._level = min(self._size, self._level + passed * self._size / MINUTE)
        missing = min(amount, self._size) - self._level
        # What rounding leaves over is not worth waiting for.
        return missing * MINUTE / self._size if missing > 1e-9 * self._size else 0.0

    def take(self, amount: float) -> None:
        """Take, below zero if need be: what was not foreseen is paid back by waiting."""
        self._level -= amount


class _Share:
    """What one key uses."""

    def __init__(self, bounds: Bounds, clock: Clock) -> None:
        self.running = 0  # choices, being read or served
        self.requests = Bucket(bounds.requests, clock) if bounds.requests else None
        self.tokens = Bucket(bounds.tokens, clock) if bounds.tokens else None


class Admission:
    """Who gets in. rows: choices that run at once."""

    def __init__(self, bounds: Bounds, rows: int, clock: Clock = time.monotonic) -> None:
        self.bounds = bounds
        self._rows, self._clock = rows, clock
        self.inside = 0  # choices being read, waiting or running
        self.waiting_tokens = 0  # of prompts being read or waiting
        self.live: dict[str, Held] = {}  # requests that were submitted and have not ended, by id
        self._shares: dict[str, _Share] = {}

    @contextmanager
    def reading(self, who: Principal, n: int, tokens: int) -> Iterator[None]:
        """Room for a request while its text is read. tokens: an estimate. Counts the request.

        Raises RequestError overloaded or rate_limited, with the time to come back.
        """
        share = self._check(who, n, tokens)
        if share.requests is not None:
            if wait := share.requests.wait(1):
                bound = self.bounds.requests
                raise _refused(f"this key may send {bound} requests a minute", wait)
            share.requests.take(1)
        self._count(share, n, tokens)
        try:
            yield
        finally:
            self._count(share, -n, -tokens)

    def enter(self, who: Principal, request: Request) -> Held:
        """Room for a request about to be submitted, until it has ended. Raises as `reading`."""
        share = self._check(who, request.n, request.given)
        self._count(share, request.n, request.given)
        if share.tokens is not None:
            share.tokens.take(request.given)
        return Held(self, who, share, request)

    def _check(self, who: Principal, n: int, tokens: int) -> _Share:
        bounds = self.bounds
        share = self._shares.get(who.name)
        if share is None:
            share = self._shares[who.name] = _Share(bounds, self._clock)
        # A request of more choices than may run at once gets its turn when it is the only one.
        if bounds.parallel and share.running and share.running + n > bounds.parallel:
            raise _refused(f"this key may have {bounds.parallel} requests at once", 1.0)
        if share.tokens is not None and (wait := share.tokens.wait(max(tokens, 1))):
            raise _refused(f"this key may use {bounds.tokens} tokens a minute", wait)
        if bounds.queue and self.inside and self.inside + n > bounds.queue + self._rows:
            raise _full("too many requests are waiting")
        waiting = self.waiting_tokens
        if bounds.queue_tokens and waiting and waiting + tokens > bounds.queue_tokens:
            raise _full("too much text is waiting to be read")
        return share

    def _count(self, share: _Share, choices: int, tokens: int) -> None:
        share.running += choices
        self.inside += choices
        self.waiting_tokens += tokens


class Held:
    """What one request holds from its submission to its end.

    `note` is to see all its events, but of deltas only the first. sink: told when its time is over.
    """

    __slots__ = ("_admission", "_late", "_left", "_request", "_share", "_waits", "sink", "who")

    def __init__(
        self, admission: Admission, who: Principal, share: _Share, request: Request
    ) -> None:
        self.who = who
        self._admission, self._share, self._request = admission, share, request
        self._left = request.n
        self._waits = True
        self._late: asyncio.TimerHandle | None = None
        self.sink: Callable[[Event], None] = _nobody

    def submitted(self) -> None:
        """From now on the request can be found by its id."""
        self._admission.live[self._request.id] = self

    def expect(self, within_s: float, cancel: Callable[[str], None]) -> None:
        """End the request with an error unless its first token is there in so many seconds."""
        loop = asyncio.get_running_loop()
        self._late = loop.call_later(max(within_s, 0.0), self._too_late, cancel)

    def note(self, event: Event) -> None:
        """Free what this event of the request frees."""
        kind = type(event)
        if kind is Delta:
            self._in_time()
        elif kind is Started:
            self._begun()
        elif kind is Finished:
            self._finished(event)  # type: ignore[arg-type]

    def drop(self) -> None:
        """The request was not taken after all."""
        self._release(self._left)
        if self._share.tokens is not None:
            self._share.tokens.take(-self._request.given)

    def _finished(self, event: Finished) -> None:
        if self._left:
            self._release(1)
            if self._share.tokens is not None:
                self._share.tokens.take(event.usage.completion_tokens)

    def _release(self, choices: int) -> None:
        self._left -= choices
        self._admission._count(self._share, -choices, 0)
        if not self._left:
            self._begun()
            self._in_time()
            if self._admission.live.get(self._request.id) is self:
                del self._admission.live[self._request.id]

    def _begun(self) -> None:
        if self._waits:
            self._waits = False
            self._admission._count(self._share, 0, -self._request.given)

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _too_late(self, cancel: Callable[[str], None]) -> None:
        self._late = None
        seconds = self._admission.bounds.first_token_s
        error = RequestError("", f"no token came within {seconds:g} s", "timeout")
        timings = RequestTimings(0.0, 0.0, 0.0, 0.0)
        prompt = len(self._request.prompt)
        # Told now; what the engine says later, once it has freed the request, is only counted.
        self.sink(Finished(self._request, 0, "error", None, Usage(prompt, 0, 0), timings, error))
        cancel(self._request.id)


def _nobody(event: Event) -> None:
    """Where events go that nobody waits for."""


def _refused(told: str, wait_s: float) -> RequestError:
    error = RequestError("", told, "rate_limited")
    error.retry_after_ms = max(1, round(wait_s * 1000))
    return error


def _full(told: str) -> RequestError:
    error = RequestError("", told, "overloaded")
    error.retry_after_ms = BUSY_MS
    return error
