"""A compiled program: its operations, the ids of its constants, and the ways to run and keep it.

Runs the same operations on the same machinery as the interpreter; all of them are known at once, so
calls and branches begin as soon as what they need is there. A file holds plain data and no code.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakSet

import msgspec
from msgspec import Struct

from spec_serve.api import messages as m
from spec_serve.client.answers import ServerError
from spec_serve.lang.backend import Backend, connected
from spec_serve.lang.conversation import Question
from spec_serve.lang.events import Ended, Event
from spec_serve.lang.explain import drawn, explained
from spec_serve.lang.foresight import questions
from spec_serve.lang.parts import Call, Gen, Op, Plain, ProgramError, Ref, asked, every
from spec_serve.lang.program import On, Program, Result, batched, streamed
from spec_serve.lang.run import Run
from spec_serve.lang.state import State
from spec_serve.lang.trace import Many, Named, Template

FORMAT = 2
_PROBE = [
    m.Turn("system", ["You're 1 <|im_end|>"]), m.Turn("user", [" Hé,\n\n  the 你好 "]),
    m.Turn("assistant", ["a", None, " b\n"]), m.Turn("user", ["for x in range(10):\n\tpass"]),
]  # fmt: skip


class Known(Struct, frozen=True):
    """Ids of pieces that hold no argument."""

    key: bytes
    pieces: list[list[int]]


class Held(Struct, frozen=True):
    """What a file holds. fingerprint: of tokenizer and template. cut: why tracing ended early.

    names: keys of the root state's values.
    """

    version: int
    name: str
    parameters: list[str]
    defaults: dict[str, Any]
    ops: list[Op]
    names: dict[str, str]
    result: Template
    known: list[Known]
    prefix: list[int]
    fingerprint: str
    cut: str = ""


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
            return await self._drive(self._run(backend, given, False), given)

    def run(self, *args: Any, on: On, **kwargs: Any) -> Result:
        """`arun` where there is no loop."""
        return asyncio.run(self.arun(*args, on=on, **kwargs))

    async def stream(self, *args: Any, on: On, **kwargs: Any) -> AsyncGenerator[Event, None]:
        """Events of a run as they come, `Ended` the last."""
        given = self._arguments(args, kwargs)
        async with connected(on) as backend:
            await self._check(backend)
            run = self._run(backend, given, True)
            async for event in streamed(run, self._drive(run, given)):
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
        Path(path).write_bytes(msgspec.msgpack.encode(self.held))

    @staticmethod
    def load(
        path: Path | str,
        *,
        functions: Mapping[str, Callable[..., Any]] | None = None,
        types: Mapping[str, Any] | None = None,
    ) -> Graph:
        """From a file. functions, types: those it names. Raises ProgramError, OSError."""
        try:
            held = msgspec.msgpack.decode(Path(path).read_bytes(), type=Held)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ProgramError(f"{path}: no compiled program: {error}") from None
        if held.version != FORMAT:
            raise ProgramError(f"{path}: of another version ({held.version}); compile it anew")
        lacking = [
            *(name for name in _functions(held.ops) if name not in (functions or {})),
            *(name for name in _types(held.ops) if name not in (types or {})),
        ]
        if lacking:
            raise ProgramError(f"{path}: needs {', '.join(lacking)}; give it to load()")
        return Graph(held, functions or {}, types or {})

    @property
    def _why(self) -> str:
        return self.held.cut

    def _arguments(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        held = self.held
        if len(args) > len(held.parameters):
            raise TypeError(f"{held.name} takes {len(held.parameters)} arguments, not {len(args)}")
        given = {**held.defaults, **dict(zip(held.parameters, args, strict=False)), **kwargs}
        for name in held.parameters:
            if name not in given:
                raise TypeError(f"{held.name}: the argument {name!r} is missing")
        unknown = sorted(set(given) - set(held.parameters))
        if unknown:
            raise TypeError(f"{held.name}: there is no parameter {unknown[0]!r}")
        return given

    async def _check(self, backend: Backend) -> None:
        if backend in self._checked:
            return
        if await fingerprint(backend) != self.held.fingerprint:
            raise ProgramError(
                f"{self.held.name} was compiled for another tokenizer or chat template"
            )
        self._checked.add(backend)

    def _run(self, backend: Backend, given: dict[str, Any], listen: bool) -> Run:
        run = Run(backend, known=self._known, given=given, listen=listen)
        for question in questions(self.held.ops, given):
            run.ask_ahead(question)
        return run

    async def _drive(self, run: Run, given: dict[str, Any]) -> Result:
        if self._program is not None and self.held.cut:
            return await self._program.drive(run, {**self._program.bound, **given})
        try:
            run.know(self._functions, self._types)
            for op in self.held.ops:
                run.submit(op)
            value = await _filled(self.held.result, run)
            await run.finish()
            if run.events is not None:
                run.events.put_nowait(Ended(value))
            return Result(value, State(run, 0, names=self.held.names))
        finally:
            await run.close()


async def _filled(result: Template, run: Run) -> Any:
    if isinstance(result, Ref):
        return await run.value(result.key)
    if isinstance(result, Many):
        return [await _filled(msgspec.convert(one, Template), run) for one in result.items]
    if isinstance(result, Named):
        named = result.items.items()
        return {name: await _filled(msgspec.convert(one, Template), run) for name, one in named}
    return result.value


def _functions(ops: Iterable[Op]) -> list[str]:
    return list(dict.fromkeys(op.function for op in every(ops) if isinstance(op, Call)))


def _types(ops: Iterable[Op]) -> list[str]:
    parses = [item.parse for item in asked(ops) if isinstance(item, Gen)]
    return list(dict.fromkeys(parse.partition(":")[2] for parse in parses if ":" in parse))


async def warm(backend: Backend, prefix: list[int]) -> None:
    """Have the server compute a prompt's beginning, so that it is in its prefix cache."""
    if prefix:
        async for _ in backend.generate(prefix, {"max_tokens": 1, "ignore_eos": True}):
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


def constant(value: Any) -> bool:
    """Whether a file can hold it."""
    try:
        Plain(msgspec.to_builtins(value))
    except TypeError:
        return False
    return True
