"""The generations behind one HTTP request: begun together, read as one stream, ended with it.

A client that leaves, or that reads too slowly, ends them in the engine. What the messages become
on the wire is the business of who reads them.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections.abc import AsyncIterator, Callable, Sequence
from time import monotonic
from types import TracebackType

from spec_serve.api import messages as m
from spec_serve.api.calls import Call, HttpError
from spec_serve.api.convert import Prepared
from spec_serve.api.generation import Generation, Numbered, Outbox, failure
from spec_serve.api.service import Service
from spec_serve.spec.request import RequestError

LOOK_S = 1.0  # between looks at whether the client still reads
SILENT_S = 15.0  # after which the reader is woken without news: proxies cut silent connections


class Run:
    """The generations of one request; `async with`, so that none outlives it.

    name: begins the ids. error: makes the answer for a failure (names of fields differ by API).
    """

    def __init__(
        self, service: Service, call: Call, name: str, error: Callable[[m.Error], HttpError]
    ) -> None:
        self.id = f"{name}-{secrets.token_hex(12)}"
        self.prepared: list[Prepared] = []
        self._service, self._call, self._error = service, call, error
        self._ready = asyncio.Event()
        self._outbox = Outbox(self._ready.set)
        self._running: dict[str, Generation] = {}
        self._guard: asyncio.Task[None] | None = None
        self._said = monotonic()

    async def __aenter__(self) -> Run:
        self._call.watch()
        self._guard = asyncio.create_task(self._look())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.cancel()
        if self._guard is not None:
            self._guard.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._guard

    def cancel(self) -> None:
        """End in the engine what still runs."""
        for generation in self._running.values():
            if not generation.over:
                self._service.link.cancel(generation.id)

    async def start(self, wires: Sequence[m.Generate]) -> None:
        """Prepare all, then submit all. The gen of wire i is str(i). Raises HttpError."""
        service = self._service
        for i, wire in enumerate(wires):
            name = f"{self.id}-{i}" if i else self.id
            if i:
                await asyncio.sleep(0)  # short texts are read on the loop, which others need too
            who = self._call.principal
            try:
                self.prepared.append(await service.prepare(wire, name, principal=who))
            except RequestError as error:
                raise self._error(failure(error, wire=wire)) from None
            self._present()
        for i, prepared in enumerate(self.prepared):
            gen = str(i)
            try:
                made = service.start(prepared, gen, self._outbox, lambda gen: None)
            except RequestError as error:
                raise self._error(failure(error, wire=prepared.wire)) from None
            self._running[gen] = made

    async def messages(self) -> AsyncIterator[list[Numbered]]:
        """What the engine said since the last look, until the last generation is over.

        Once it has begun, nothing now and then while it is silent. Raises HttpError when one fails
        or is cancelled from elsewhere, ConnectionResetError when the client has gone.
        """
        begun = False
        while True:
            await self._ready.wait()
            self._ready.clear()
            self._present()
            taken = self._outbox.take()
            for i, message in enumerate(taken):
                error = self._failure(message)
                if error is not None:
                    if i:
                        yield taken[:i]
                    raise error
            now = monotonic()
            if taken or (begun and now - self._said > SILENT_S):
                begun, self._said = True, now
                yield taken
            if not self._outbox and all(made.over for made in self._running.values()):
                return

    def _failure(self, message: Numbered) -> HttpError | None:
        if type(message) is m.Error:
            return self._error(message)
        if type(message) is m.Finished and message.reason == "cancelled":
            if self._service.draining:
                return HttpError("draining", "the server is shutting down", retry_after_s=5)
            return HttpError("cancelled", "the generation was cancelled")
        return None

    def _present(self) -> None:
        if self._call.gone.is_set():
            raise ConnectionResetError("the client went away")

    async def _look(self) -> None:
        """Wake the reader when the client has gone; cut it off when it does not read."""
        gone = self._call.gone
        while not gone.is_set():
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    await gone.wait()
            if self._outbox.overflowing:
                self._call.cut()
                break
            if monotonic() - self._said > SILENT_S:
                self._ready.set()
        self.cancel()
        self._ready.set()
