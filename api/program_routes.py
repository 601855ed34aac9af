"""`POST /v1/programs`: the programs the operator registered, over HTTP, as one answer or a stream.

Runs them beside the engine under the caller's key; a client that leaves ends its run. Knows how an
answer looks, not how a program runs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from msgspec import Struct

from spec_serve.api import program_wire as w
from spec_serve.api.calls import Call, HttpError, Route
from spec_serve.api.in_process import InProcessClient
from spec_serve.api.openai_stream import DONE, event
from spec_serve.api.parts import Part
from spec_serve.api.programs import Told, performed, plain, refused, value_of
from spec_serve.api.service import Service
from spec_serve.lang import events as e
from spec_serve.lang.backend import ClientBackend
from spec_serve.lang.held import arguments
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.programs")
T = TypeVar("T")

STUCK_S = 30.0  # a reader of a stream that takes nothing for so long is cut off


class ProgramRequest(Part):
    """program: its name. arguments: by name. stream: tell text and values as they come."""

    program: str
    arguments: dict[str, Any] = {}
    stream: bool = False


class Variable(Struct, omit_defaults=True):
    """What a `gen` or `select` gave. texts: one for each choice. path: names of its forks."""

    name: str
    texts: list[str]
    meta: w.ProgramMeta
    path: str = ""


class ProgramAnswer(Struct):
    """value: what the program returned. variables: in the order in which they were there."""

    program: str
    value: Any
    variables: list[Variable]
    messages: list[dict[str, str]]
    text: str
    object: str = "program.result"


class ProgramEvent(Struct, omit_defaults=True):
    """One event of a stream; the last one has the answer."""

    delta: w.ProgramDelta | None = None
    variable: Variable | None = None
    answer: ProgramAnswer | None = None


class ProgramCard(Struct):
    """A program that may be asked for. defaults: of the parameters that have one."""

    id: str
    parameters: list[str]
    defaults: dict[str, Any]
    object: str = "program"


class ProgramList(Struct):
    """All there are."""

    data: list[ProgramCard]
    object: str = "list"


class _Programs:
    def __init__(self, service: Service) -> None:
        self._service = service

    async def list(self, call: Call) -> None:
        """Which there are."""
        cards = [
            ProgramCard(name, one.held.parameters, one.held.defaults)
            for name, one in self._service.programs
        ]
        await call.say(ProgramList(cards))

    async def run(self, call: Call) -> None:
        """Run one."""
        asked = await call.json(ProgramRequest)
        try:
            found = self._service.programs.find(asked.program)
        except RequestError as error:
            told = str(error).partition(": ")[2]
            raise HttpError("not_found", told, "program") from None
        try:
            given = arguments(found.held, (), asked.arguments)
        except TypeError as error:
            raise HttpError("invalid_request", str(error), "arguments") from None
        variables: list[Variable] = []

        async def tell(told: Told) -> None:
            if isinstance(told, e.Delta) and asked.stream:
                delta = w.ProgramDelta("", told.path, told.var, told.text, list(told.ids))
                await self._send(call, ProgramEvent(delta=delta))
            elif isinstance(told, e.Done):
                value = value_of("", told)
                variables.append(Variable(value.var, value.texts, value.meta, value.path))
                if asked.stream:
                    await self._send(call, ProgramEvent(variable=variables[-1]))

        async def work() -> ProgramAnswer:
            async with InProcessClient(self._service, call.principal) as client:
                backend = ClientBackend(client)
                await found.prepare(backend)
                end = await performed(backend, found.held, given, found.functions, tell)
            value, name = plain(end.value), asked.program
            return ProgramAnswer(name, value, variables, end.messages, end.text)

        call.watch()
        try:
            answer = await _while_there(call, work())
        except OSError:
            raise
        except Exception as error:
            await self._fail(call, error)
            return
        if not asked.stream:
            return await call.say(answer)
        await self._send(call, ProgramEvent(answer=answer))
        await call.chunk(DONE)
        await call.end()

    async def _send(self, call: Call, told: ProgramEvent) -> None:
        if not call.started:
            await call.stream()
        try:
            async with asyncio.timeout(STUCK_S):
                await call.chunk(event(told))
        except TimeoutError:
            call.cut()
            raise ConnectionResetError("the client does not read") from None

    async def _fail(self, call: Call, error: Exception) -> None:
        told = refused(error, None)
        if told.code == "engine_error":
            log.exception("a program failed, request %s", call.id, exc_info=error)
        said = HttpError.of(told)
        if not call.started:
            raise said from error
        await call.chunk(event(said.body()))
        await call.end()


async def _while_there(call: Call, work: Coroutine[Any, Any, T]) -> T:
    """Its result. Raises ConnectionResetError once the client has gone, and ends the work."""
    task, gone = asyncio.ensure_future(work), asyncio.ensure_future(call.gone.wait())
    try:
        await asyncio.wait((task, gone), return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ConnectionResetError("the client went away")
        return await task
    finally:
        gone.cancel()
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError, Exception):
            await task


def routes(service: Service) -> list[Route]:
    """Of programs."""
    programs = _Programs(service)
    return [
        Route("GET", "/v1/programs", programs.list),
        Route("POST", "/v1/programs", programs.run),
    ]
