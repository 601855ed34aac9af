"""`@program`: a function that writes into a state, and the ways to run it.

A coroutine function runs on the caller's loop, a plain one in a thread of its own, where it takes
values by `get()`. Knows no tokens.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, TypeVar, get_type_hints

from spec_serve.client import Client
from spec_serve.lang.backend import Backend, connected
from spec_serve.lang.events import Ended, Event
from spec_serve.lang.parts import ProgramError
from spec_serve.lang.run import Run
from spec_serve.lang.state import State, Value

if TYPE_CHECKING:
    from spec_serve.lang.graph import Graph

T = TypeVar("T")
_CONST = "known when the program is compiled"
Const = Annotated[T, _CONST]
On = str | Client | Backend


@dataclass(frozen=True, slots=True)
class Result:
    """value: what the program returned, lists for tuples; state: its root state, finished."""

    value: Any
    state: State

    def __getitem__(self, name: str) -> Any:
        """The value of a variable of the root state."""
        return self.state.value(name)


class Program:
    """A function of a state and arguments. `on`, everywhere: an address, a client, or a backend."""

    def __init__(self, fn: Callable[..., Any], bound: Mapping[str, Any] | None = None) -> None:
        self.fn = fn
        self.bound = dict(bound or {})
        self.name: str = getattr(fn, "__name__", "program")
        signature = inspect.signature(fn)
        names = list(signature.parameters)
        if not names:
            raise TypeError(f"{self.name}: a program's first parameter is its state")
        unknown = sorted(set(self.bound) - set(names[1:]))
        if unknown:
            raise TypeError(f"{self.name}: there is no parameter {unknown[0]!r}")
        kinds = {parameter.kind for parameter in signature.parameters.values()}
        if kinds & {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}:
            raise TypeError(f"{self.name}: a program names its parameters one by one")
        self.parameters = names[1:]
        self._signature = signature

    @property
    def constants(self) -> frozenset[str]:
        """Parameters that are to be bound before compiling."""
        try:
            hints = get_type_hints(self.fn, include_extras=True)
        except NameError:  # annotations that name what only exists where the function was written
            raw = getattr(self.fn, "__annotations__", {})
            return frozenset(n for n in self.parameters if "Const[" in str(raw.get(n, "")))
        return frozenset(
            name for name in self.parameters
            if _CONST in getattr(hints.get(name), "__metadata__", ())
        )  # fmt: skip

    def __call__(self, state: State, *args: Any, **kwargs: Any) -> Any:
        """As a part of another program."""
        return self.fn(state, *args, **{**self.bound, **kwargs})

    def bind(self, **constants: Any) -> Program:
        """The program with some of its arguments given. Raises TypeError."""
        return Program(self.fn, {**self.bound, **constants})

    def arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """By name, defaults included. Raises TypeError as a call would."""
        given = self._signature.bind(None, *args, **{**self.bound, **kwargs})
        given.apply_defaults()
        held = dict(given.arguments)
        del held[next(iter(held))]
        return held

    async def arun(self, *args: Any, on: On, **kwargs: Any) -> Result:
        """Run it. Raises what the program raises, and what fails beside it."""
        given = self.arguments(args, kwargs)
        async with connected(on) as backend:
            return await self._drive(Run(backend), given)

    def run(self, *args: Any, on: On, **kwargs: Any) -> Result:
        """`arun` where there is no loop."""
        return asyncio.run(self.arun(*args, on=on, **kwargs))

    async def stream(self, *args: Any, on: On, **kwargs: Any) -> AsyncGenerator[Event, None]:
        """Events of a run as they come, `Ended` the last. Leaving early ends the run."""
        given = self.arguments(args, kwargs)
        async with connected(on) as backend:
            run = Run(backend, events=asyncio.Queue())
            async for event in streamed(run.events, self._drive(run, given)):
                yield event

    async def abatch(
        self,
        many: Iterable[Mapping[str, Any]],
        *,
        on: On,
        concurrency: int = 16,
        ordered: bool = True,
    ) -> AsyncGenerator[Result, None]:
        """Results for many sets of arguments by name, `concurrency` of them at once."""
        async with connected(on) as backend:

            def begin(given: Mapping[str, Any]) -> Coroutine[Any, Any, Result]:
                return self.arun(on=backend, **given)

            async for result in batched(begin, many, concurrency, ordered):
                yield result

    def run_batch(
        self,
        many: Iterable[Mapping[str, Any]],
        *,
        on: On,
        concurrency: int = 16,
        ordered: bool = True,
    ) -> list[Result]:
        """`abatch` where there is no loop, all results at once."""

        async def go() -> list[Result]:
            made = self.abatch(many, on=on, concurrency=concurrency, ordered=ordered)
            return [result async for result in made]

        return asyncio.run(go())

    async def acompile(self, *, on: On, partial: bool = False) -> Graph:
        """Trace it and get everything ready that needs no arguments; see graph.py.

        partial: keep what comes before the first thing that can't be traced; a run goes on from
        there as it is written. Raises TraceError with the line otherwise.
        """
        from spec_serve.lang.compiling import compiled

        async with connected(on) as backend:
            return await compiled(self, backend, partial)

    def compile(self, *, on: On, partial: bool = False) -> Graph:
        """`acompile` where there is no loop."""
        return asyncio.run(self.acompile(on=on, partial=partial))

    async def drive(self, run: Run, given: dict[str, Any]) -> Result:
        """The function itself on a run that was prepared, then everything it began."""
        return await self._drive(run, given)

    async def _drive(self, run: Run, given: dict[str, Any]) -> Result:
        state = run.root()
        try:
            if inspect.iscoroutinefunction(self.fn):
                value = await self.fn(state, **given)
            else:
                value = await asyncio.to_thread(self.fn, state, **given)
            value = await resolved(value)
            await run.finish()
            if run.events is not None:
                run.events.put_nowait(Ended(value))
            return Result(value, state)
        finally:
            await run.close()


async def resolved(value: Any) -> Any:
    """What a program returned, with values in it as they are; tuples come as lists."""
    if isinstance(value, Value):
        return await value
    if isinstance(value, list | tuple):
        return [await resolved(one) for one in value]
    if isinstance(value, dict):
        return {name: await resolved(one) for name, one in value.items()}
    return value


def program(fn: Callable[..., Any]) -> Program:
    """Make a function of a state a program."""
    return Program(fn)


async def streamed(
    events: asyncio.Queue[Event | None] | None, work: Coroutine[Any, Any, Result]
) -> AsyncGenerator[Event, None]:
    """Events of a run while `work` drives it."""
    assert events is not None
    task = asyncio.create_task(work)
    try:
        while (event := await events.get()) is not None:
            yield event
        await task
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def batched(
    begin: Callable[[Mapping[str, Any]], Coroutine[Any, Any, Result]],
    many: Iterable[Mapping[str, Any]],
    concurrency: int,
    ordered: bool,
) -> AsyncIterator[Result]:
    """Results of many runs, at most `concurrency` of them at once. Raises the first failure."""
    if concurrency < 1:
        raise ProgramError("concurrency must be at least 1")
    left = iter(many)
    running: list[asyncio.Task[Result]] = []
    try:
        while True:
            while len(running) < concurrency and (given := next(left, None)) is not None:
                running.append(asyncio.create_task(begin(given)))
            if not running:
                return
            if ordered:
                yield await running[0]
                del running[0]
            else:
                over, _ = await asyncio.wait(running, return_when=asyncio.FIRST_COMPLETED)
                for task in over:
                    running.remove(task)
                    yield task.result()
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def parallel(*runs: Coroutine[Any, Any, T]) -> list[T]:
    """Different runs side by side. What fails comes as an ExceptionGroup, and ends the others."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(run) for run in runs]
    return [task.result() for task in tasks]
