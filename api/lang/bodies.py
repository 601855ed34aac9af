"""`cond` and `loop`: functions that write what is done once, or again and again, as operations.

A body is run once with a state that only records, whether the program is interpreted or traced; so
both run the same. A body's names have one key each, whichever of its cases writes them; what they
stand for until then is kept beside. Knows no server.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from spec_serve.lang.events import Meta
from spec_serve.lang.parts import (
    Append,
    Body,
    Call,
    Cond,
    Fork,
    Loop,
    Op,
    ProgramError,
    Ref,
    TraceError,
    asked,
    every,
)
from spec_serve.lang.state import Sink, State, Value, Writes, where
from spec_serve.lang.trace import tidy
from spec_serve.lang.values import written

MOST_ROUNDS = 1000


class Recorder:
    """A Sink (state.py) for one body of the state of another one."""

    tracing = True

    def __init__(self, outer: Sink) -> None:
        self._outer = outer
        self.ops: list[Op] = []

    def number(self) -> int:
        """As outside."""
        return self._outer.number()

    def owns(self, other: object) -> bool:
        """Values of what stands around it, too."""
        return other is self or self._outer.owns(other)

    def submit(self, op: Op) -> None:
        """Keep it. Raises ProgramError for a fork."""
        if isinstance(op, Fork):
            raise ProgramError(f"{where()}: a body of cond or loop can't fork")
        self.ops.append(tidy(op))

    def know(self, functions: dict[str, Callable[..., Any]], types: dict[str, Any]) -> None:
        """As outside."""
        self._outer.know(functions, types)

    async def wait(self, value: Value) -> Any:
        """Nothing is there."""
        raise _unknown()

    def get(self, value: Value) -> Any:
        """Nothing is there."""
        raise _unknown()

    def now(self, key: str) -> tuple[Any, Meta]:
        """Nothing is there."""
        raise _unknown()

    async def settle(self, state: int) -> None:
        """Nothing is there."""
        raise _unknown()

    def drop(self, state: int) -> None:
        """Nothing to end."""

    def words(self, key: str) -> Any:
        """Nothing comes."""
        raise _unknown()

    def held(self, state: int) -> tuple[str, list[int], list[dict[str, str]]]:
        """Nothing is there."""
        raise _unknown()


def _unknown() -> TraceError:
    return TraceError(f"{where()}: the body of cond or loop only writes; a run knows its values")


def cond(
    state: State, value: Value, cases: Mapping[Any, Writes | None], other: Writes | None
) -> None:
    """See State.cond."""
    on, place = _key(state, value), where()
    mark = f"c{state._sink.number()}"
    made = {written(case): _recorded(state, body, mark)[0] for case, body in cases.items()}
    rest = _recorded(state, other, mark)[0]
    every_one = [*made.values(), rest]
    before = _before(state, mark, every_one, "")
    state._sink.submit(Cond(state._number, on, made, rest, before, place))
    _rename(state, mark, every_one)


def loop(state: State, most: int, body: Writes, until: Any) -> None:
    """See State.loop."""
    if not isinstance(most, int) or not 1 <= most <= MOST_ROUNDS:
        raise ValueError(f"loop: most must be a whole number from 1 to {MOST_ROUNDS}")
    texts = until if isinstance(until, tuple | list | set | frozenset) else [until]
    ends, place = [written(text) for text in texts], where()
    mark = f"c{state._sink.number()}"
    made, told = _recorded(state, body, mark)
    if bool(ends) != isinstance(told, Value):
        raise ProgramError(
            f"{place}: a loop has both or neither: `until`, and a body that returns a value"
        )
    end = told._key if isinstance(told, Value) else ""
    before = _before(state, mark, [made], end)
    state._sink.submit(Loop(state._number, most, made, end, ends, before, place))
    _rename(state, mark, [made])


def _key(state: State, value: Value) -> str:
    if not isinstance(value, Value) or not state._sink.owns(value._sink):
        raise ProgramError(f"{where()}: cond goes by a value of this run")
    return value._key


def _recorded(state: State, write: Writes | None, mark: str) -> tuple[Body, Value | None]:
    """A body, and what its function returned."""
    if write is None:
        return Body(), None
    if inspect.iscoroutinefunction(write):
        raise TypeError("cond, loop: a body is a plain function, not a coroutine function")
    sink = Recorder(state._sink)
    names = {name: _marked(state, name, mark) for name in state._names}
    held = State(sink, state._number, state._path, names, mark)
    held._count = state._count
    told = write(held)
    if isinstance(told, Value) and not sink.owns(told._sink):
        raise ProgramError(f"{where()}: the value belongs to another run")
    carry = {}
    for name in _names(sink.ops):
        key, last = _marked(state, name, mark), held._names[name]
        if key != last:
            carry[key] = last
    return Body(sink.ops, carry), told


def _marked(state: State, name: str, mark: str) -> str:
    return f"{state._number}/{name}#{mark}"


def _names(ops: list[Op]) -> list[str]:
    """Of what the model writes in a body."""
    return list(dict.fromkeys(item.key.partition("/")[2].rpartition("#")[0] for item in asked(ops)))


def _before(state: State, mark: str, made: list[Body], end: str) -> dict[str, str]:
    """What the keys that these bodies use stood for outside."""
    used = {end, *(key for body in made for key in (*_used(body.ops), *body.carry))}
    outside = {_marked(state, name, mark): key for name, key in state._names.items()}
    return {key: outside[key] for key in outside if key in used}


def _used(ops: list[Op]) -> Iterator[str]:
    yield from (item.key for item in asked(ops))
    for op in every(ops):
        if isinstance(op, Append):
            yield from (item.key for item in op.items if isinstance(item, Ref))
        elif isinstance(op, Call):
            yield from (arg.key for arg in op.args if isinstance(arg, Ref))
        elif isinstance(op, Cond | Loop):
            yield op.on if isinstance(op, Cond) else op.end
            yield from op.before.values()


def _rename(state: State, mark: str, made: list[Body]) -> None:
    """From here on the names a body wrote are what they are in it."""
    for body in made:
        for name in _names(body.ops):
            state._names[name] = _marked(state, name, mark)
    state._count += 1
