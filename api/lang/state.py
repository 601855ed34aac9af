"""The state a program writes into, its branches, and handles of values that are not there yet.

A front only: everything goes to a sink, which runs it at once (run.py) or keeps it as a graph
(trace.py). Nothing here waits but `await`.
"""

from __future__ import annotations

import sys
from collections.abc import (
    AsyncIterator,
    Awaitable,
    Callable,
    Generator,
    Iterator,
    Mapping,
    Sequence,
)
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Protocol, Self

import msgspec

from spec_serve.lang.events import Meta
from spec_serve.lang.parts import (
    Append,
    Call,
    Const,
    Fork,
    Gen,
    GenPart,
    Item,
    Op,
    Plain,
    ProgramError,
    Ref,
    Role,
    Select,
    SelectPart,
    TraceError,
    Turn,
)
from spec_serve.lang.values import written

Writes = Callable[["State"], "Value | None"]
_HERE = str(Path(__file__).parent)


def where() -> str:
    """file:line of the program that called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_HERE):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


class Sink(Protocol):
    """Where a program's operations go."""

    tracing: bool

    def number(self) -> int:
        """A number no state, call or body of this program has yet."""
        ...

    def owns(self, other: object) -> bool:
        """Whether values of that sink may stand in what this one is given."""
        ...

    def submit(self, op: Op) -> None:
        """Take an operation; from any thread."""
        ...

    def know(self, functions: dict[str, Callable[..., Any]], types: dict[str, Any]) -> None:
        """What operations name."""
        ...

    def wait(self, value: Value) -> Awaitable[Any]:
        """Its value; itself while tracing."""
        ...

    def get(self, value: Value) -> Any:
        """Its value, blocking a thread that is not the loop's."""
        ...

    def now(self, key: str) -> tuple[Any, Meta]:
        """The value that is there. Raises ProgramError where it is not."""
        ...

    def settle(self, state: int) -> Awaitable[None]:
        """Once all that was written into a state so far is done."""
        ...

    def drop(self, state: int) -> None:
        """End a state's work."""
        ...

    def words(self, key: str) -> AsyncIterator[str]:
        """A variable's text as it comes."""
        ...

    def held(self, state: int) -> tuple[str, list[int], list[dict[str, str]]]:
        """Text, ids and messages of a state."""
        ...


class Value:
    """A value that is on its way: await it, or write it into a state as a part of its own."""

    __slots__ = ("_key", "_sink")
    __hash__ = object.__hash__

    def __init__(self, sink: Sink, key: str) -> None:
        self._sink, self._key = sink, key

    def __await__(self) -> Generator[Any, None, Any]:
        return self._sink.wait(self).__await__()

    def get(self) -> Any:
        """The value, in programs that are no coroutines: blocks until it is there."""
        return self._sink.get(self)

    def __repr__(self) -> str:
        return f"<value {self._key}>"

    def _refuse(self, doing: str) -> NoReturn:
        if self._sink.tracing:
            raise TraceError(
                f"{where()}: {doing} depends on a value that only a run has; write it as "
                "s.cond or s.loop, or compile with partial=True"
            )
        raise ProgramError(f"{where()}: {doing}: the value isn't here yet; await it first")

    def __str__(self) -> str:
        raise TraceError(
            f"{where()}: a value in an f-string or str() is not known when the string is made; "
            "write s += ('Hi ', name) with the value as a part of its own"
        )

    def __format__(self, spec: str) -> str:
        return str(self)

    def __bool__(self) -> bool:
        self._refuse("a condition")

    def __len__(self) -> int:
        self._refuse("a length")

    def __iter__(self) -> Iterator[Any]:
        self._refuse("a loop")

    def __getitem__(self, key: object) -> Any:
        self._refuse("an index")

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        self._refuse(f"the attribute {name!r}")

    def _compared(self, other: object) -> bool:
        self._refuse("a comparison")

    __eq__ = __ne__ = __lt__ = __le__ = __gt__ = __ge__ = _compared
    __int__ = __float__ = __index__ = lambda self: self._refuse("a number")

    def __add__(self, other: object) -> Any:
        self._refuse("an addition")

    __radd__ = __add__


class State:
    """What the model has read and written so far; grows by `+=` and never changes otherwise.

    Parts of `+=`: text, values, roles, `gen`, `select`, and tuples of these. Text is plain text:
    it can't become control tokens, whatever stands in it.
    """

    def __init__(
        self,
        sink: Sink,
        number: int,
        path: str = "",
        names: dict[str, str] | None = None,
        body: str = "",
    ) -> None:
        self._sink, self._number, self._path = sink, number, path
        self._names = dict(names or {})
        self._count = 0
        self._body = body  # in one, the same name has the same key wherever it stands

    def __iadd__(self, part: Any) -> Self:
        if isinstance(part, Turn):
            self._append(part.role, part.parts)
        elif isinstance(part, tuple | list) and any(isinstance(one, Turn) for one in part):
            for one in part:
                self += one
        else:
            self._append("", (part,))
        return self

    def __getitem__(self, name: str) -> Value:
        """The newest value of this name. Raises ProgramError where nothing has it yet."""
        if name not in self._names:
            raise ProgramError(f"{where()}: nothing is called {name!r} in this state so far")
        return Value(self._sink, self._names[name])

    def fork(self, n: int, names: Sequence[str] | None = None) -> Branches:
        """n states that begin with all that was written here so far; they run side by side.

        names: of the branches, default "0", "1", ... Raises ValueError.
        """
        told = [str(i) for i in range(n)] if names is None else list(names)
        if n < 1 or len(told) != n or len(set(told)) != n:
            raise ValueError(f"fork: {n} branches need as many different names")
        children = [self._sink.number() for _ in told]
        self._sink.submit(Fork(self._number, children, told))
        return Branches(
            self._sink,
            [
                State(self._sink, child, f"{self._path}.{name}".lstrip("."), self._names)
                for child, name in zip(children, told, strict=True)
            ],
            told,
        )

    def call(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float | None = None,
        retries: int = 0,
    ) -> Value:
        """Call a function here, on the client's side, as soon as its arguments are there.

        fn: a coroutine function, or a plain one, which gets a thread. args: values, or anything
        JSON can hold. timeout: seconds of each attempt. Its error is raised where it is awaited.
        """
        name = getattr(fn, "__qualname__", None) or type(fn).__name__
        self._sink.know({name: fn}, {})
        key = f"call:{self._sink.number()}"
        given = [
            Ref(arg._key) if isinstance(arg, Value) else Plain(msgspec.to_builtins(arg))
            for arg in args
        ]
        self._sink.submit(Call(key, name, given, timeout, retries))
        return Value(self._sink, key)

    def cond(
        self,
        value: Value,
        cases: Mapping[Any, Writes | None],
        other: Writes | None = None,
    ) -> None:
        """Go on by what a value is: a case for each text, number or member of an Enum it may be.

        Each case is a plain function that writes into the state it is given, as a graph would: it
        runs once, when this is written, and values in it are not there yet. None writes nothing;
        so does a value without a case where there is no `other`. A name that the case taken did
        not write keeps its value from before, or is None.
        """
        from spec_serve.lang.bodies import cond

        cond(self, value, cases, other)

    def loop(self, most: int, body: Writes, until: Any = ()) -> None:
        """Do what `body` writes up to `most` times; `body` is as the cases of `cond`.

        until: it ends once the value that `body` returned is this, or one of these.
        """
        from spec_serve.lang.bodies import loop

        loop(self, most, body, until)

    def value(self, name: str) -> Any:
        """A value that is there already. Raises ProgramError where it is not."""
        return self._sink.now(self[name]._key)[0]

    def meta(self, name: str) -> Meta:
        """What a value that is there cost, and why it ended."""
        return self._sink.now(self[name]._key)[1]

    def logprob(self, name: str) -> float:
        """Of all tokens of a value that was generated with `logprobs`, or of the selected text."""
        meta = self.meta(name)
        if meta.scores is not None:
            return float(meta.scores[self.value(name)])
        if not meta.logprobs:
            raise ProgramError(f"{where()}: generate {name!r} with logprobs=0 to know its own")
        return sum(one.logprob for one in meta.logprobs)

    def stream(self, name: str) -> AsyncIterator[str]:
        """A variable's text, piece by piece."""
        return self._sink.words(self[name]._key)

    async def text(self) -> str:
        """Of the last turn, or of all where there are no turns, once it is all there."""
        await self._sink.settle(self._number)
        return self._sink.held(self._number)[0]

    async def ids(self) -> list[int]:
        """All token ids up to the last generated one."""
        await self._sink.settle(self._number)
        return self._sink.held(self._number)[1]

    async def messages(self) -> list[dict[str, str]]:
        """The turns as a chat has them."""
        await self._sink.settle(self._number)
        return self._sink.held(self._number)[2]

    def _append(self, role: Role, parts: Sequence[Any]) -> None:
        self._sink.submit(Append(self._number, role, self._items(role, parts), where()))

    def _items(self, role: Role, parts: Sequence[Any]) -> list[Item]:
        items: list[Item] = []
        for part in parts:
            if isinstance(part, Value):
                if not self._sink.owns(part._sink):
                    raise ProgramError(f"{where()}: the value belongs to another run")
                items.append(Ref(part._key))
            elif isinstance(part, GenPart | SelectPart):
                if role not in ("", "assistant"):
                    raise ProgramError(f"{where()}: the model writes in assistant turns only")
                items.append(self._generated(part))
            elif isinstance(part, tuple | list):
                items += self._items(role, part)
            elif isinstance(part, Turn):
                raise ProgramError(f"{where()}: a turn within a turn")
            else:
                items.append(Const(written(part)))
        return items

    def _generated(self, part: GenPart | SelectPart) -> Item:
        name = part.name or f"_{self._count}"
        key = f"{self._number}/{name}#{self._body or self._count}"
        self._count += 1
        self._names[name] = key
        if isinstance(part, GenPart):
            self._sink.know({}, dict(part.shape.types))
            return Gen(key, part.options, part.shape.parse, part.heal)
        return Select(key, part.choices, part.rule, part.temperature, part.seed)


class Branches:
    """States of a fork. A context manager for the look of it; leaving it by an error drops them."""

    def __init__(self, sink: Sink, states: list[State], names: list[str]) -> None:
        self._sink, self._states, self._names = sink, states, names

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            for state in self._states:
                self._sink.drop(state._number)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def __len__(self) -> int:
        return len(self._states)

    def __getitem__(self, which: int | str) -> State:
        """By place or by name."""
        place = self._names.index(which) if isinstance(which, str) else which
        return self._states[place]

    def __setitem__(self, which: int | str, state: State) -> None:
        """Makes `branches["a"] += ...` work; a branch can't be another state."""
        if state is not self[which]:
            raise TypeError("a branch can't be replaced; write into it with +=")

    async def join(
        self, pick: Callable[[list[State]], Any] | None = None, *, first: bool = False
    ) -> Any:
        """Wait for all branches; the states, or what `pick` makes of them.

        first: wait for the first one only, which is returned, and drop the others. What fails in
        branches comes as one ExceptionGroup.
        """
        if self._sink.tracing and (pick is not None or first):
            raise TraceError(f"{where()}: which branch is picked is known to a run only")
        return await self._sink_join(pick, first)

    async def _sink_join(self, pick: Callable[[list[State]], Any] | None, first: bool) -> Any:
        import asyncio

        async def settled(state: State) -> State:
            await self._sink.settle(state._number)
            return state

        tasks = [asyncio.ensure_future(settled(state)) for state in self._states]
        if first:
            over, left = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
            for task, state in zip(tasks, self._states, strict=True):
                if task in left:
                    self._sink.drop(state._number)
            await asyncio.gather(*left, return_exceptions=True)
            return over.pop().result()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        errors = [one for one in found if isinstance(one, Exception)]
        if errors:
            raise ExceptionGroup("branches failed", errors)
        return self._states if pick is None else pick(self._states)
