"""A compiled program: its operations, the ids of its constants, and the ways to run and keep it.

Runs the same operations on the same machinery as the interpreter; all of them are known at once, so
calls and branches begin as soon as what they need is there. A file holds plain data and no code.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import (
    AsyncGenerator,
    Callable,
    Coroutine,
    Iterable,
    Mapping,
)
from functools import cached_property
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec

from spec_serve.api import messages as m
from spec_serve.api.program_wire import MAX_GRAPH
from spec_serve.client.answers import ServerError
from spec_serve.client.programs import ProgramDesk
from spec_serve.lang.backend import Backend, connected
from spec_serve.lang.conversation import Question
from spec_serve.lang.events import Event
from spec_serve.lang.explain import drawn, explained
from spec_serve.lang.foresight import questions
from spec_serve.lang.held import Held, arguments, called_functions, decoded, named_types, operated
from spec_serve.lang.parts import ProgramError
from spec_serve.lang.program import On, Program, Result, batched, streamed
from spec_serve.lang.remote import Remote
from spec_serve.lang.run import Run
from spec_serve.lang.state import State

_PROBE = [
    m.Turn("system", ["You're 1 <|im_end|>"]), m.Turn("user", [" Hé,\n\n  the 你好 "]),
    m.Turn("assistant", ["a", None, " b\n"]), m.Turn("user", ["for x in range(10):\n\tpass"]),
]  # fmt: skip


class Graph:
    """Made by Program.compile or Graph.load; `on` as everywhere in this package."""

    def __init__(
        self,
        held: Held,
        functions: Mapping[str, Callable[..., Any]],
        types: Mapping[str, Any],
        program: Program | None = None,
    ) -> None:
        self.held = held
        self._functions, self._types = dict(functions), dict(types)
        self._program = program
        self._known = {one.key: one.pieces for one in held.known}
        self._checked: WeakSet[Any] = WeakSet()

    async def arun(self, *args: Any, on: On, **kwargs: Any) -> Result:
        """Run it. Errors as of a program's; ProgramError for another tokenizer or template."""
        given = self._arguments(args, kwargs)
        async with connected(on) as backend:
            await self._check(backend)
            if (desk := self._beside(backend)) is not None:
                return await self._remote(given, False).drive(desk)
            return await self._drive(self._run(backend, given, False), given)

    def run(self, *args: Any, on: On, **kwargs: Any) -> Result:
        """`arun` where there is no loop."""
        return asyncio.run(self.arun(*args, on=on, **kwargs))

    async def stream(self, *args: Any, on: On, **kwargs: Any) -> AsyncGenerator[Event, None]:
        """Events of a run as they come, `Ended` the last."""
        given = self._arguments(args, kwargs)
        async with connected(on) as backend:
            await self._check(backend)
            if (desk := self._beside(backend)) is not None:
                remote = self._remote(given, True)
                source = streamed(remote.events, remote.drive(desk))
            else:
                run = self._run(backend, given, True)
                source = streamed(run.events, self._drive(run, given))
            async for event in source:
                yield event

    async def abatch(
        self,
        many: Iterable[Mapping[str, Any]],
        *,
        on: On,
        concurrency: int = 16,
        ordered: bool = True,
    ) -> AsyncGenerator[Result, None]:
        """Results for many sets of arguments by name; the constant prefix is warmed once before."""
        async with connected(on) as backend:
            await self._check(backend)
            if getattr(backend, "prepares", True):
                await warm(backend, self.held.prefix)

            def begin(given: Mapping[str, Any]) -> Coroutine[Any, Any, Result]:
                return self.arun(on=backend, **given)

            async for result in batched(begin, many, concurrency, ordered):
                yield result

    def explain(self) -> str:
        """The graph as text: operations, ids that are known, what is late, the prefix."""
        return explained(self.held.name, self.held.ops, self._known, self.held.prefix, self._why)

    def svg(self) -> str:
        """The graph as a drawing: a column for each state, one for calls."""
        return drawn(self.held.ops)

    def save(self, path: Path | str) -> None:
        """To a file. Raises ProgramError for a partial graph, which needs its program."""
        if self.held.cut:
            raise ProgramError(f"a partial graph can't be saved: {self.held.cut}")
        Path(path).write_bytes(self._encoded)

    @staticmethod
    def load(
        path: Path | str,
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> Graph:
        """From a file. functions, types: those it names. Raises ProgramError, OSError."""
        held = decoded(Path(path).read_bytes(), str(path))
        lacking = [
            *(name for name in called_functions(held.ops) if name not in (functions or {})),
            *(name for name in named_types(held.ops) if name not in (types or {})),
        ]
        if lacking:
            raise ProgramError(f"{path}: needs {', '.join(lacking)}; give it to load()")
        return Graph(held, functions or {}, types or {})

    @property
    def _why(self) -> str:
        return self.held.cut

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        return arguments(self.held, args, kwargs)

    async def _check(self, backend: Backend) -> None:
        if backend in self._checked:
            return
        if await fingerprint(backend) != self.held.fingerprint:
            raise ProgramError(
                f"{self.held.name} was compiled for another tokenizer or chat template"
            )
        self._checked.add(backend)

    def _run(self, backend: Backend, given: dict[str, Any], listen: bool) -> Run:
        events: asyncio.Queue[Event | None] | None = asyncio.Queue() if listen else None
        run = Run(backend, known=self._known, given=given, events=events)
        for question in questions(self.held.ops, given):
            run.ask_ahead(question)
        return run

    def _beside(self, backend: Backend) -> ProgramDesk | None:
        """Who runs it on the server, if that is possible."""
        desk = getattr(backend, "programs", None)
        if not isinstance(desk, ProgramDesk) or self.held.cut:
            return None
        return desk if len(self._encoded) <= MAX_GRAPH else None

    def _remote(self, given: dict[str, Any], listen: bool) -> Remote:
        return Remote(self.held, self._encoded, self._functions, self._types, given, listen)

    @cached_property
    def _encoded(self) -> bytes:
        return msgspec.msgpack.encode(self.held)

    async def _drive(self, run: Run, given: dict[str, Any]) -> Result:
        if self._program is not None and self.held.cut:
            return await self._program.drive(run, {**self._program.bound, **given})
        run.know(self._functions, self._types)
        value = await operated(run, self.held)
        return Result(value, State(run, 0, names=self.held.names))


async def warm(backend: Backend, prefix: list[int]) -> None:
    """Have the server compute a prompt's beginning, so that it is in its prefix cache, and stays
    there longer than others (a hint)."""
    if prefix:
        asked = {"max_tokens": 1, "ignore_eos": True, "keep": True}
        async for _ in backend.generate(prefix, asked):
            pass


async def fingerprint(backend: Backend) -> str:
    """Of tokenizer and chat template, by what they make of some texts."""
    told = hashlib.sha256()
    for question in (
        Question(text=[part for turn in _PROBE for part in turn.parts]),
        Question(turns=_PROBE, begun=["So"]),
        Question(turns=_PROBE[1:], begun=[]),
    ):
        try:
            told.update(repr(await backend.pieces(question)).encode())
        except ServerError as error:  # a template that knows no system turns
            told.update(error.code.encode())
    return told.hexdigest()
