"""A compiled program as plain data: what a file holds, what a server is sent, and its run.

No code is in it; functions and classes stand there by name. Knows no server.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
from msgspec import Struct

from spec_serve.lang.events import Ended
from spec_serve.lang.parts import Call, Gen, Op, Plain, ProgramError, Ref, asked, every
from spec_serve.lang.run import Run
from spec_serve.lang.trace import Many, Named, Template

FORMAT = 2


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


def decoded(data: bytes, place: str) -> Held:
    """A graph's file; place: what it is called. Raises ProgramError."""
    try:
        held = msgspec.msgpack.decode(data, type=Held)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ProgramError(f"{place}: no compiled program: {error}") from None
    if held.version != FORMAT:
        raise ProgramError(f"{place}: of another version ({held.version}); compile it anew")
    return held


def arguments(held: Held, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """By name, defaults included. Raises TypeError as a call would."""
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


async def operated(run: Run, held: Held) -> Any:
    """Do all that a graph says on a run, and end it; what the program returns."""
    try:
        run.look_ahead(held.ops)
        for op in held.ops:
            run.submit(op)
        value = await filled(held.result, run.value)
        await run.finish()
        if run.events is not None:
            run.events.put_nowait(Ended(value))
        return value
    finally:
        await run.close()


async def filled(result: Template, value: Callable[[str], Awaitable[Any]]) -> Any:
    """What a program returns. value: that of a key."""
    if isinstance(result, Ref):
        return await value(result.key)
    if isinstance(result, Many):
        return [await filled(msgspec.convert(one, Template), value) for one in result.items]
    if isinstance(result, Named):
        named = result.items.items()
        return {name: await filled(msgspec.convert(one, Template), value) for name, one in named}
    return result.value


def results(result: Template) -> Iterator[str]:
    """Keys that a program's result refers to."""
    if isinstance(result, Ref):
        yield result.key
    elif isinstance(result, Many | Named):
        items = result.items if isinstance(result, Many) else result.items.values()
        for one in items:
            yield from results(msgspec.convert(one, Template))


def called_functions(ops: Iterable[Op]) -> list[str]:
    """Names of the functions that operations call."""
    return list(dict.fromkeys(op.function for op in every(ops) if isinstance(op, Call)))


def named_types(ops: Iterable[Op]) -> list[str]:
    """Names of the classes that values are read as."""
    parses = [item.parse for item in asked(ops) if isinstance(item, Gen)]
    return list(dict.fromkeys(parse.partition(":")[2] for parse in parses if ":" in parse))


def constant(value: Any) -> bool:
    """Whether a file can hold it."""
    try:
        Plain(msgspec.to_builtins(value))
    except TypeError:
        return False
    return True
