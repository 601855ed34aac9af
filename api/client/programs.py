"""Programs that run on the server for one client: what is said of each goes to who runs it.

Knows a way to say things; what a program is, is spec_serve.lang's business.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncGenerator, Awaitable, Callable
from typing import Any

from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.client.answers import ConnectionLost, ServerError


class ProgramDesk:
    """`client.programs`. say: sends a message, and raises ConnectionLost."""

    def __init__(self, say: Callable[[m.Client], Awaitable[None]]) -> None:
        self._say = say
        self._running: dict[str, asyncio.Queue[w.Answers | Exception]] = {}
        self._numbers = itertools.count()
        self._room = asyncio.Semaphore(w.MAX_RUNS)

    async def run(
        self,
        name: str = "",
        *,
        graph: bytes | None = None,
        arguments: dict[str, Any] | None = None,
        events: bool = False,
    ) -> AsyncGenerator[w.Answers, None]:
        """What the server says of one run, to its `ProgramEnd`; fields as of `RunProgram`.

        Waits while as many run on this connection as may. Leaving early ends the run, and so does
        a drop of the connection. Raises ServerError, ConnectionLost.
        """
        async with self._room:
            run = f"p{next(self._numbers)}"
            queue = self._running[run] = asyncio.Queue()
            over = False
            try:
                await self._say(w.RunProgram(run, name, graph, arguments or {}, events))
                while not over:
                    said = await queue.get()
                    over = isinstance(said, Exception | w.ProgramEnd)
                    if isinstance(said, Exception):
                        raise said
                    yield said
            finally:
                del self._running[run]
                if not over:
                    with contextlib.suppress(ConnectionLost):
                        await self._say(m.Cancel(run))

    async def answer(self, call: w.ProgramCall, text: str, error: str | None = None) -> None:
        """Give back what a call gave."""
        await self._say(w.Called(call.run, call.number, text, error))

    def take(self, message: m.Server) -> bool:
        """A message from the server; whether it was about a program."""
        if isinstance(message, w.Answers):
            run: str | None = message.run
        elif isinstance(message, m.Error) and message.gen in self._running:
            run = message.gen
        else:
            return False
        queue = self._running.get(run or "")
        if queue is not None:
            queue.put_nowait(ServerError(message) if isinstance(message, m.Error) else message)
        return True

    def lost(self, code: int | None) -> None:
        """The connection is gone."""
        for queue in self._running.values():
            queue.put_nowait(ConnectionLost(code))
