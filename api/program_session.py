"""Programs of one session: runs that were asked for, calls that wait for the client's answers.

A run's generations go through a client in this process, under the same key and bounds as if they
came over the wire. Knows no socket.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.api.auth import Principal
from spec_serve.api.in_process import InProcessClient
from spec_serve.api.programs import (
    CallFailed,
    Told,
    Wanted,
    checked,
    performed,
    plain,
    refused,
    unread,
    value_of,
)
from spec_serve.api.service import Service
from spec_serve.lang import events as e
from spec_serve.lang.backend import Backend, ClientBackend
from spec_serve.lang.held import Held, arguments, decoded
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.programs")

READ_S = 0.005  # until a client that is slow to read may have read something


class Programs:
    """say: sends a message. full: whether too much waits for the client."""

    def __init__(
        self,
        service: Service,
        principal: Principal,
        say: Callable[[m.Server], None],
        full: Callable[[], bool],
    ) -> None:
        self._service, self._principal = service, principal
        self._say, self._full = say, full
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._waiting: dict[tuple[str, int], asyncio.Future[str]] = {}
        self._client: InProcessClient | None = None
        self._backend: ClientBackend | None = None  # one, so that all runs keep to its bounds
        self._opening = asyncio.Lock()

    def __contains__(self, run: str) -> bool:
        return run in self._runs

    def __len__(self) -> int:
        return len(self._runs)

    def receive(self, message: w.RunProgram | w.Called) -> None:
        """A program to run, or what a call gave."""
        if isinstance(message, w.RunProgram):
            return self._begin(message)
        answer = self._waiting.pop((message.run, message.number), None)
        if answer is None or answer.done():
            return
        if message.error is None:
            answer.set_result(message.text)
        else:
            answer.set_exception(CallFailed(message.number, message.error))

    def cancel(self, run: str) -> None:
        """End a run; nothing more is said of it."""
        self._runs[run].cancel()

    def close(self) -> None:
        """End all of them."""
        for task in self._runs.values():
            task.cancel()

    def _begin(self, asked: w.RunProgram) -> None:
        run = asked.run
        if run in self._runs:
            told = f"run: {run!r} is already running on this socket"
            return self._say(m.Error("duplicate_id", told, param="run"))
        if len(self._runs) >= w.MAX_RUNS:
            told = f"at most {w.MAX_RUNS} programs run at once on one socket"
            return self._say(m.Error("overloaded", told, gen=run, retryable=True))
        task = self._runs[run] = asyncio.create_task(self._run(asked))
        task.add_done_callback(lambda _: self._over(run))

    def _over(self, run: str) -> None:
        del self._runs[run]
        for key in [key for key in self._waiting if key[0] == run]:
            self._waiting.pop(key).cancel()
        if not self._runs and self._client is not None:
            client, self._client, self._backend = self._client, None, None
            closing = asyncio.create_task(client.close())
            _CLOSING.add(closing)
            closing.add_done_callback(_CLOSING.discard)

    async def _run(self, asked: w.RunProgram) -> None:
        try:
            backend = await self._connected()
            held, functions = await self._graph(asked, backend)

            async def tell(event: Told) -> None:
                await self._told(asked, event)

            given = arguments(held, (), asked.arguments) if asked.name else asked.arguments
            end = await performed(backend, held, given, functions, tell)
            end.run = asked.run
            # The client of a graph makes it of what it was told.
            end.value = plain(end.value) if asked.name else None
            self._say(end)
        except Exception as error:
            said = refused(error, asked.run)
            if said.code == "engine_error":
                log.exception("a program failed")
            self._say(said)

    async def _graph(
        self, asked: w.RunProgram, backend: Backend
    ) -> tuple[Held, dict[str, Callable[..., Any]]]:
        if bool(asked.name) == (asked.graph is not None):
            raise RequestError("graph", "exactly one of name and graph is needed")
        if asked.graph is not None:
            return unread(checked(decoded(asked.graph, "graph"))), {}
        found = self._service.programs.find(asked.name)
        await found.prepare(backend)
        return found.held, dict(found.functions)

    async def _told(self, asked: w.RunProgram, event: Told) -> None:
        while self._full():
            await asyncio.sleep(READ_S)
        if isinstance(event, Wanted):
            self._waiting[asked.run, event.number] = event.answer
            self._say(w.ProgramCall(asked.run, event.op.key, event.number, event.refs))
        elif isinstance(event, e.Done):
            self._say(value_of(asked.run, event))
        elif isinstance(event, e.Delta) and asked.events:
            told = w.ProgramDelta(asked.run, event.path, event.var, event.text, list(event.ids))
            self._say(told)

    async def _connected(self) -> Backend:
        async with self._opening:
            if self._backend is None:
                client = InProcessClient(self._service, self._principal)
                await client.__aenter__()
                self._client, self._backend = client, ClientBackend(client)
            return self._backend


_CLOSING: set[asyncio.Task[None]] = set()
