"""Programs run beside the engine: graphs of clients, and those the operator registered.

Operations go to the engine without a round trip to the client; calls of a client's own functions
go back to it. Registered graphs are files of `Graph.save` in a folder; the functions they call come
from a module the operator names. Knows no transport.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.api.generation import failure
from spec_serve.client.answers import ServerError
from spec_serve.lang import events as e
from spec_serve.lang.backend import Backend
from spec_serve.lang.foresight import questions
from spec_serve.lang.graph import fingerprint, warm
from spec_serve.lang.held import Held, called_functions, decoded, operated, results
from spec_serve.lang.parts import (
    Append,
    Body,
    Call,
    Cond,
    Fork,
    Gen,
    Item,
    Loop,
    Op,
    ProgramError,
    every,
)
from spec_serve.lang.run import Run
from spec_serve.lang.values import written
from spec_serve.spec.request import RequestError

MOST_STATES = 256
SUFFIX = ".graph"


@dataclass(slots=True)
class Registered:
    """A graph of the operator's. checked: against this server's tokenizer, and warm."""

    held: Held
    functions: Mapping[str, Callable[..., Any]]
    checked: bool = False
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def prepare(self, backend: Backend) -> None:
        """Once: see that it is for this tokenizer, and compute its beginning."""
        async with self.lock:
            if self.checked:
                return
            if await fingerprint(backend) != self.held.fingerprint:
                told = f"{self.held.name} was compiled for another tokenizer or chat template"
                raise ProgramError(told)
            await warm(backend, self.held.prefix)
            self.checked = True


class Registry:
    """Programs by name: their files' names, without the suffix."""

    def __init__(self, programs: Mapping[str, Registered] | None = None) -> None:
        self._programs = dict(programs or {})

    def __iter__(self) -> Iterator[tuple[str, Registered]]:
        return iter(self._programs.items())

    def find(self, name: str) -> Registered:
        """Raises RequestError."""
        if name not in self._programs:
            raise RequestError("name", f"no program is registered as {name[:64]!r}")
        return self._programs[name]


def registered(folder: str, module: str) -> Registry:
    """The graphs of a folder. module: where the functions they call are; "" = none.

    Raises ValueError naming the setting.
    """
    if not folder:
        return Registry()
    try:
        held = importlib.import_module(module) if module else None
    except ImportError as error:
        raise ValueError(f"program-functions: {error}") from None
    made: dict[str, Registered] = {}
    try:
        files = sorted(Path(folder).iterdir())
    except OSError as error:
        raise ValueError(f"programs: {folder}: {error.strerror or error}") from None
    for file in files:
        if file.suffix != SUFFIX:
            continue
        try:
            graph = checked(decoded(file.read_bytes(), file.name))
        except (ProgramError, OSError) as error:
            raise ValueError(f"programs: {error}") from None
        names = called_functions(graph.ops)
        functions = {name: getattr(held, name, None) for name in names}
        for name, function in functions.items():
            if not callable(function):
                told = f"{file.name} calls {name}, which program-functions has not"
                raise ValueError(f"programs: {told}")
        made[file.stem] = Registered(graph, functions)  # type: ignore[arg-type]
    return Registry(made)


def checked(held: Held) -> Held:
    """A graph that may be run here. Raises ProgramError."""
    if held.cut:
        raise ProgramError(f"a partial graph can't be run without its program: {held.cut}")
    states = sum(len(op.children) for op in every(held.ops) if isinstance(op, Fork))
    if states >= MOST_STATES:
        raise ProgramError(f"a program may have at most {MOST_STATES} states here")
    return held


def unread(held: Held) -> Held:
    """The graph with all values left as texts: its client knows their types."""
    return msgspec.structs.replace(held, ops=_unread(held.ops))


def _unread(ops: list[Op]) -> list[Op]:
    return [_unread_one(op) for op in ops]


def _unread_one(op: Op) -> Op:
    replace = msgspec.structs.replace
    if isinstance(op, Append):
        return replace(op, items=[_unread_item(item) for item in op.items])
    if isinstance(op, Cond):
        cases = {text: _unread_body(body) for text, body in op.cases.items()}
        return replace(op, cases=cases, other=_unread_body(op.other))
    return replace(op, body=_unread_body(op.body)) if isinstance(op, Loop) else op


def _unread_item(item: Item) -> Item:
    return msgspec.structs.replace(item, parse="text") if isinstance(item, Gen) else item


def _unread_body(body: Body) -> Body:
    return msgspec.structs.replace(body, ops=_unread(body.ops))


@dataclass(frozen=True, slots=True)
class Wanted:
    """A call that the client is to make."""

    op: Call
    number: int
    refs: list[int | None]
    answer: asyncio.Future[str]


class CallFailed(RuntimeError):
    """A client's call that gave nothing. number: which."""

    def __init__(self, number: int, told: str) -> None:
        super().__init__(told)
        self.number = number


Told = e.Event | Wanted


async def performed(
    backend: Backend,
    held: Held,
    given: Mapping[str, Any],
    functions: Mapping[str, Callable[..., Any]],
    tell: Callable[[Told], Awaitable[None]],
) -> w.ProgramEnd:
    """Run a graph to its end, telling everything in order; `run` of what is returned is empty.

    Calls of functions that are not given are told, to be answered. Raises what the run raises.
    """
    told: asyncio.Queue[Any] = asyncio.Queue()

    async def far(op: Call, number: int, refs: list[int | None]) -> str:
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        told.put_nowait(Wanted(op, number, refs, answer))
        return await answer

    ahead = questions(held.ops, given)
    known = {one.key: one.pieces for one in held.known}
    run = Run(backend, known=known, given=given, events=told, far=far)
    run.know(functions, {})
    for question in ahead:
        run.ask_ahead(question)
    work = asyncio.create_task(operated(run, held))
    try:
        while (event := await told.get()) is not None:
            await tell(event)
        value = await work
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
    text, ids, messages = run.held(0)
    keys = {*held.names.values(), *results(held.result)}
    named = {key: run.number_of(key) for key in keys if not key.startswith("arg:")}
    return w.ProgramEnd("", value, text, ids, messages, named)


def plain(value: Any) -> Any:
    """What a program returned, as data. Raises ProgramError."""
    try:
        return msgspec.to_builtins(value)
    except TypeError as error:
        raise ProgramError(f"what the program returns can't be told: {error}") from None


def value_of(run: str, event: e.Done) -> w.ProgramValue:
    """As it is said."""
    values = event.value if event.many else [event.value]
    texts = [written(value) for value in values]
    meta = event.meta
    told = {name: getattr(meta, name) for name in meta.__dataclass_fields__}
    told["ids"] = list(meta.ids)
    told["logprobs"] = [
        w.TokenLogprob(one.id, one.logprob, one.token, one.top) for one in meta.logprobs
    ]
    return w.ProgramValue(
        run, event.key, event.number, event.path, event.var, texts, w.ProgramMeta(**told)
    )


def refused(error: BaseException, run: str | None) -> m.Error:
    """What went wrong, as it is said."""
    if isinstance(error, RequestError):
        return failure(error, run)
    if isinstance(error, ServerError):
        return m.Error(
            error.code, str(error), gen=run, param=error.param, retryable=error.retryable,
            retry_after_ms=error.retry_after_ms,
        )  # fmt: skip
    if isinstance(error, CallFailed):
        return m.Error("invalid_request", str(error), gen=run, param=f"call:{error.number}")
    if isinstance(error, ProgramError | TypeError | ValueError):
        return m.Error("invalid_request", str(error), gen=run, param="program")
    if isinstance(error, RecursionError):
        told = "the graph is nested too deeply"
        return m.Error("invalid_request", told, gen=run, param="program")
    if isinstance(error, LookupError):
        told = f"the graph can't be run: it refers to {error}, which it does not have"
        return m.Error("invalid_request", told, gen=run, param="program")
    return m.Error("engine_error", f"the program failed: {type(error).__name__}", gen=run)
