"""A graph's run on the server, as the client sees it: values come, calls go out, a state is left.

What its State asks (a Sink, state.py) is answered from what the server told. Knows no operations
but calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.client.answers import ServerError
from spec_serve.client.programs import ProgramDesk
from spec_serve.lang import events as e
from spec_serve.lang.backend import connected
from spec_serve.lang.calling import called
from spec_serve.lang.held import Held, filled
from spec_serve.lang.parts import Call, Gen, Op, Plain, ProgramError, Ref, asked, every
from spec_serve.lang.program import On, Result
from spec_serve.lang.state import State, Value
from spec_serve.lang.values import read, written

IN_PROGRAM, IN_CALL = "program", "call"  # `param` of errors: of the program, of the client's call


class Remote:
    """One run. encoded: what the server is sent; given: arguments by name.

    listen: whether events go to `events`.
    """

    tracing = False

    def __init__(
        self,
        held: Held,
        encoded: bytes,
        functions: Mapping[str, Callable[..., Any]],
        types: Mapping[str, Any],
        given: Mapping[str, Any],
        listen: bool,
    ) -> None:
        self._graph, self._encoded, self._given = held, encoded, given
        self._functions, self._types = functions, types
        self.events: asyncio.Queue[e.Event | None] | None = asyncio.Queue() if listen else None
        self._parse = {one.key: one.parse for one in asked(held.ops) if isinstance(one, Gen)}
        self._ops = {one.key: one for one in every(held.ops) if isinstance(one, Call)}
        self._values: dict[int, tuple[Any, e.Meta]] = {}  # by number, those of calls too
        self._calls: set[asyncio.Task[None]] = set()
        self._failed: dict[int, Exception] = {}  # calls, by number
        self._end = w.ProgramEnd("")

    async def drive(self, desk: ProgramDesk) -> Result:
        """Run it. Raises as a run here would."""
        texts = {}
        for name, value in self._given.items():
            with contextlib.suppress(TypeError):  # what is only handed to calls needs no text
                texts[name] = written(value)
        listen = self.events is not None
        said = desk.run(graph=self._encoded, arguments=texts, events=listen)
        try:
            async with aclosing(said):
                async for message in said:
                    self._take(message, desk)
            value = await filled(self._graph.result, self._final)
            self._tell(e.Ended(value))
            return Result(value, State(self, 0, names=self._graph.names))
        except ServerError as error:
            raise self._meant(error) from None
        finally:
            for task in list(self._calls):
                task.cancel()
            await asyncio.gather(*self._calls, return_exceptions=True)
            if self.events is not None:
                self.events.put_nowait(None)

    def _take(self, message: w.Answers, desk: ProgramDesk) -> None:
        if isinstance(message, w.ProgramDelta):
            self._tell(e.Delta(message.path, message.var, message.text, tuple(message.ids)))
        elif isinstance(message, w.ProgramValue):
            parse = self._parse.get(message.key, "text")
            values = [read(parse, text, self._types) for text in message.texts]
            many, meta, number = len(values) > 1, _meta(message.meta), message.number
            value = values if many else values[0]
            self._values[number] = value, meta
            self._tell(e.Done(message.path, message.var, value, meta, message.key, number, many))
        elif isinstance(message, w.ProgramCall):
            op = self._ops[message.key]
            args = list(map(self._argument, op.args, message.refs))
            task = asyncio.create_task(self._call(op, args, message, desk))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)
        else:
            self._end = message

    def _argument(self, arg: Plain | Ref, ref: int | None) -> Any:
        if isinstance(arg, Plain):
            return arg.value
        if ref is None:
            return self._given[arg.key.removeprefix("arg:")]
        return self._values[ref][0] if ref >= 0 else None

    async def _call(
        self, op: Call, args: list[Any], asked: w.ProgramCall, desk: ProgramDesk
    ) -> None:
        try:
            value = await called(op, self._functions[op.function], args)
        except Exception as error:
            self._failed[asked.number] = error
            self._tell(e.Called(op.function, False))
            await desk.answer(asked, "", f"{type(error).__name__}: {error}"[:1000])
            return
        self._values[asked.number] = value, e.Meta()
        self._tell(e.Called(op.function, True))
        try:
            text = written(value)
        except TypeError as error:  # only wrong if the text is needed
            self._failed[asked.number] = error
            text = ""
        await desk.answer(asked, text)

    def _meant(self, error: ServerError) -> Exception:
        """What a run here would have raised."""
        where, _, number = (error.param or "").partition(":")
        if where == IN_CALL and (failed := self._failed.get(int(number))) is not None:
            return failed
        return _meant(error)

    def _tell(self, event: e.Event) -> None:
        if self.events is not None:
            self.events.put_nowait(event)

    async def _final(self, key: str) -> Any:
        return self._last(key)[0]

    def _last(self, key: str) -> tuple[Any, e.Meta]:
        """A key's value in the end."""
        if key.startswith("arg:"):
            return self._given[key.removeprefix("arg:")], e.Meta()
        return self._values.get(self._end.named[key], (None, e.Meta()))

    # -- what a State asks

    def number(self) -> int:
        """The run is over."""
        raise _over()

    def owns(self, other: object) -> bool:
        """As a run."""
        return other is self

    def submit(self, op: Op) -> None:
        """The run is over."""
        raise _over()

    def know(self, functions: Mapping[str, Any], types: Mapping[str, Any]) -> None:
        """The run is over."""
        raise _over()

    async def wait(self, value: Value) -> Any:
        """Its value."""
        return self._last(value._key)[0]

    def get(self, value: Value) -> Any:
        """Its value."""
        return self._last(value._key)[0]

    def now(self, key: str) -> tuple[Any, e.Meta]:
        """Value and meta."""
        return self._last(key)

    async def settle(self, state: int) -> None:
        """All is there."""

    def drop(self, state: int) -> None:
        """Nothing runs."""

    async def words(self, key: str) -> AsyncIterator[str]:
        """All of it at once."""
        yield str(self._last(key)[0])

    def held(self, state: int) -> tuple[str, list[int], list[dict[str, str]]]:
        """Of the first state."""
        end = self._end
        return end.text, end.ids, end.messages


async def run_registered(program: str, /, *, on: On, **arguments: Any) -> Any:
    """What a program the server offers returns, as plain data. Raises ServerError, ProgramError."""
    async with connected(on) as backend:
        desk = getattr(backend, "programs", None)
        if not isinstance(desk, ProgramDesk):
            raise ProgramError("this server runs no programs")
        given = msgspec.to_builtins(arguments)
        try:
            async for message in desk.run(program, arguments=given):
                if isinstance(message, w.ProgramEnd):
                    return message.value
        except ServerError as error:
            raise _meant(error) from None
    raise AssertionError("a run ends by its end, or by an error")


def _meant(error: ServerError) -> Exception:
    return ProgramError(str(error)) if error.param == IN_PROGRAM else error


def _over() -> ProgramError:
    return ProgramError("the run is over; nothing can be written into its state")


def _meta(told: w.ProgramMeta) -> e.Meta:
    given = {name: getattr(told, name) for name in told.__struct_fields__}
    given["ids"] = tuple(told.ids)
    given["logprobs"] = tuple(
        m.Logprob(one.id, one.logprob, one.token, one.top) for one in told.logprobs
    )
    return e.Meta(**given)
