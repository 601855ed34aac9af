"""Tracing: a program run once on values nobody has, so that its operations become a graph.

Straight-line code and loops over what is known unroll. What depends on a value or argument is
refused with its line, never guessed. Knows no server.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from spec_serve.lang.events import Meta
from spec_serve.lang.parts import Append, Const, Item, Op, Plain, ProgramError, Ref, TraceError
from spec_serve.lang.state import State, Value, where

if TYPE_CHECKING:
    from spec_serve.lang.program import Program


class Many(Struct, frozen=True, tag="many"):
    """A list of results."""

    items: list[Any]


class Named(Struct, frozen=True, tag="named"):
    """A dict of results."""

    items: dict[str, Any]


Template = Plain | Ref | Many | Named


class Tracer:
    """A Sink (state.py) that keeps what it is given."""

    tracing = True

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.functions: dict[str, Callable[..., Any]] = {}
        self.types: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    def number(self) -> int:
        """Of a state, a call or a body."""
        return next(self._numbers)

    def owns(self, other: object) -> bool:
        """Whether values of that sink may stand here."""
        return other is self

    def submit(self, op: Op) -> None:
        """Keep it, constants in a row as one."""
        self.ops.append(tidy(op))

    def know(self, functions: dict[str, Callable[..., Any]], types: dict[str, Any]) -> None:
        """Functions and classes by name. Raises ProgramError for two of one name."""
        tables: tuple[tuple[dict[str, Any], dict[str, Any]], ...] = (
            (self.functions, functions), (self.types, types),
        )  # fmt: skip
        for held, new in tables:
            for name, made in new.items():
                if held.setdefault(name, made) != made:  # methods are made anew
                    raise ProgramError(f"two different things are called {name!r}")

    async def wait(self, value: Value) -> Any:
        """The value itself, which stands for what a run will have."""
        return value

    def get(self, value: Value) -> Any:
        """As `wait`."""
        return value

    def now(self, key: str) -> tuple[Any, Meta]:
        """Nothing is there."""
        raise TraceError(f"{where()}: what a value is, only a run knows")

    async def settle(self, state: int) -> None:
        """Nothing to wait for."""

    def drop(self, state: int) -> None:
        """Nothing to end."""

    def words(self, key: str) -> AsyncIterator[str]:
        """Nothing comes."""
        raise TraceError(f"{where()}: a stream within a program needs a run")

    def held(self, state: int) -> tuple[str, list[int], list[dict[str, str]]]:
        """Nothing is there."""
        raise TraceError(f"{where()}: what a state holds, only a run knows")


def tidy(op: Op) -> Op:
    """Constants in a row as one."""
    return msgspec.structs.replace(op, items=merged(op.items)) if isinstance(op, Append) else op


def merged(items: list[Item]) -> list[Item]:
    """Constants that follow each other as one; empty ones go."""
    made: list[Item] = []
    for item in items:
        if isinstance(item, Const) and not item.text:
            continue
        if made and isinstance(item, Const) and isinstance(made[-1], Const):
            made[-1] = Const(made[-1].text + item.text)
        else:
            made.append(item)
    return made


def template(value: Any) -> Template:
    """What a program returns, with references in place of values. Raises TraceError."""
    if isinstance(value, Value):
        return Ref(value._key)
    if isinstance(value, list | tuple):
        return Many([template(one) for one in value])
    if isinstance(value, dict):
        return Named({str(name): template(one) for name, one in value.items()})
    try:
        return Plain(msgspec.to_builtins(value))
    except TypeError:
        raise TraceError(
            f"a {type(value).__name__} can't be what a compiled program returns; return values"
        ) from None


async def traced(program: Program) -> tuple[Tracer, dict[str, str], Template, str]:
    """Operations, the root state's names, result, and why tracing ended early, "" if it did not.

    Raises TraceError for constants that are not bound, and whatever the program raises by itself.
    """
    unbound = sorted(program.constants - set(program.bound))
    if unbound:
        raise TraceError(f"{program.name}: bind {unbound[0]!r} before compiling")
    tracer = Tracer()
    given = {
        name: program.bound[name] if name in program.bound else Value(tracer, f"arg:{name}")
        for name in program.parameters
    }
    root = State(tracer, 0)
    try:
        made = program.fn(root, **given)
        value = await made if inspect.isawaitable(made) else made
        return tracer, root._names, template(value), ""
    except TraceError as error:
        return tracer, root._names, Plain(None), str(error)
