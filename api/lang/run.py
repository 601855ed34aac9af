"""Runs a program's operations: a task for each state, one for each call, tokens from a backend.

The same for programs that are interpreted and for graphs. Knows no syntax: what it is given are
operations (parts.py), in the order in which the program made them.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from spec_serve.api import messages as m
from spec_serve.client.answers import Answer
from spec_serve.lang import events as e
from spec_serve.lang.backend import Backend
from spec_serve.lang.conversation import Conversation, Question
from spec_serve.lang.generating import kept, meta_of, requested
from spec_serve.lang.parts import (
    Append,
    Call,
    Const,
    Fork,
    Gen,
    Item,
    Op,
    Plain,
    ProgramError,
    Ref,
    Select,
)
from spec_serve.lang.scoring import best, scored
from spec_serve.lang.state import State, Value
from spec_serve.lang.values import read, written


@dataclass(slots=True, eq=False)
class _Variable:
    """A value to come. text: as the model wrote it. state: whose it is, None for a call."""

    future: asyncio.Future[Any]
    path: str
    name: str
    state: _Thread | None
    text: str = ""
    meta: e.Meta = field(default_factory=e.Meta)
    listeners: list[asyncio.Queue[str | None]] = field(default_factory=list)


@dataclass(slots=True, eq=False)
class _Thread:
    """A state at work. told: its failure has reached the program."""

    path: str
    start: asyncio.Future[Conversation]
    queue: asyncio.Queue[Append | Fork | asyncio.Future[None] | None]
    conversation: Conversation = field(default_factory=Conversation)
    failed: BaseException | None = None
    told: bool = False
    task: asyncio.Task[None] | None = None


class Run:
    """One run of a program; belongs to the loop it is made in. A Sink (state.py).

    known: pieces by Question.key, from a graph. given: arguments by name. listen: whether events
    go to `events`.
    """

    tracing = False

    def __init__(
        self,
        backend: Backend,
        *,
        known: Mapping[bytes, list[list[int]]] | None = None,
        given: Mapping[str, Any] | None = None,
        listen: bool = False,
    ) -> None:
        self._backend = backend
        self._known = known or {}
        self._given = given or {}
        self.events: asyncio.Queue[e.Event | None] | None = asyncio.Queue() if listen else None
        self._loop = asyncio.get_running_loop()
        self._home = threading.get_ident()
        self._numbers = itertools.count(1)
        self._functions: dict[str, Callable[..., Any]] = {}
        self._types: dict[str, Any] = {}
        self._variables: dict[str, _Variable] = {}
        self._threads: dict[int, _Thread] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._asked: dict[bytes, asyncio.Task[list[list[int]]]] = {}
        root = self._thread(0, "")
        root.start.set_result(Conversation())

    def root(self) -> State:
        """The state the program is given."""
        return State(self, 0)

    # -- what programs say

    def number(self) -> int:
        """Of a state or call."""
        return next(self._numbers)

    def know(self, functions: Mapping[str, Callable[..., Any]], types: Mapping[str, Any]) -> None:
        """Functions and classes by name. Raises ProgramError for two of one name."""
        for held, new in ((self._functions, functions), (self._types, types)):
            for name, made in new.items():
                if held.setdefault(name, made) is not made:
                    raise ProgramError(f"two different things are called {name!r}")

    def submit(self, op: Op) -> None:
        """Take an operation; from any thread."""
        if threading.get_ident() == self._home:
            self._apply(op)
        else:
            self._loop.call_soon_threadsafe(self._apply, op)

    async def wait(self, value: Value) -> Any:
        """Its value. Raises what went wrong."""
        return await self._wait(value._key)

    async def value(self, key: str) -> Any:
        """The value of a key (parts.py)."""
        return await self._wait(key)

    def get(self, value: Value) -> Any:
        """Its value, in another thread than the loop's."""
        if threading.get_ident() == self._home:
            raise ProgramError("get() would block the loop; await the value instead")
        return asyncio.run_coroutine_threadsafe(self._wait(value._key), self._loop).result()

    def now(self, key: str) -> tuple[Any, e.Meta]:
        """Value and meta, if they are there."""
        held = self._variables.get(key)
        if held is None or not held.future.done():
            raise ProgramError("the value isn't here yet; await it first")
        return held.future.result(), held.meta

    async def settle(self, state: int) -> None:
        """Wait for all that was written into a state so far."""
        thread = self._threads[state]
        mark: asyncio.Future[None] = self._loop.create_future()
        if thread.task is not None and thread.task.done():
            if thread.failed is not None:
                thread.told = True
                raise thread.failed
            return
        thread.queue.put_nowait(mark)
        try:
            await mark
        except Exception:
            thread.told = True
            raise

    def drop(self, state: int) -> None:
        """End a state's work; its values will not come."""
        thread = self._threads[state]
        thread.told = True
        if thread.task is not None:
            thread.task.cancel()

    async def words(self, key: str) -> AsyncIterator[str]:
        """A variable's text as it comes."""
        held = self._variables[key]
        queue: asyncio.Queue[str | None] = asyncio.Queue()
        if held.text:
            queue.put_nowait(held.text)
        if held.future.done():
            queue.put_nowait(None)
        held.listeners.append(queue)
        while (piece := await queue.get()) is not None:
            yield piece
        await self._wait(key)

    def held(self, state: int) -> tuple[str, list[int], list[dict[str, str]]]:
        """Text, ids and messages of a state."""
        held = self._threads[state].conversation
        return held.text, held.ids, held.messages

    # -- the run's own life

    def ask_ahead(self, question: Question) -> None:
        """Have a question answered that will probably be asked."""
        key = question.key
        if key not in self._known and key not in self._asked:
            self._asked[key] = self._task(self._backend.pieces(question))

    async def finish(self) -> None:
        """Wait for everything. Raises the first failure the program has not seen."""
        for thread in self._threads.values():
            thread.queue.put_nowait(None)
        workers = [t.task for t in self._threads.values() if t.task is not None]
        await asyncio.gather(*workers, return_exceptions=True)
        for thread in self._threads.values():
            if thread.failed is not None and not thread.told:
                raise thread.failed
        calls = [held for held in self._variables.values() if held.state is None]
        await asyncio.gather(*(held.future for held in calls), return_exceptions=True)

    async def close(self) -> None:
        """End what still works."""
        left = list(self._tasks)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        if self.events is not None:
            self.events.put_nowait(None)

    def _task(self, work: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._over)
        return task

    def _over(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # whoever waits for it is told

    def _thread(self, number: int, path: str) -> _Thread:
        made = _Thread(path, self._loop.create_future(), asyncio.Queue())
        self._threads[number] = made
        made.task = self._task(self._work(made))
        return made

    def _variable(self, key: str, thread: _Thread | None, name: str = "") -> _Variable:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        name = name or key.partition("/")[2].rpartition("#")[0]
        made = _Variable(future, "" if thread is None else thread.path, name, thread)
        self._variables[key] = made
        return made

    def _apply(self, op: Op) -> None:
        if isinstance(op, Call):
            self._task(self._call(op, self._variable(op.key, None, op.function)))
            return
        if isinstance(op, Fork):
            thread = self._threads[op.parent]
            for child, name in zip(op.children, op.names, strict=True):
                self._thread(child, f"{thread.path}.{name}".lstrip("."))
        else:
            thread = self._threads[op.state]
            for item in op.items:
                if isinstance(item, Gen | Select):
                    made = self._variable(item.key, thread)
                    if thread.failed is not None:
                        made.future.set_exception(thread.failed)
        thread.queue.put_nowait(op)

    # -- states at work

    async def _work(self, thread: _Thread) -> None:
        try:
            thread.conversation = await thread.start
        except Exception as error:
            thread.failed, thread.told = error, True  # the parent's failure
        try:
            while (op := await thread.queue.get()) is not None:
                try:
                    if thread.failed is not None:
                        raise thread.failed
                    if isinstance(op, asyncio.Future):
                        if not op.done():
                            op.set_result(None)
                    elif isinstance(op, Fork):
                        for child in op.children:
                            self._threads[child].start.set_result(thread.conversation.copy())
                    else:
                        await self._append(thread, op)
                except Exception as error:
                    self._fail(thread, op, error)
        except asyncio.CancelledError:
            dropped = ProgramError("the state was dropped")
            thread.failed = dropped
            while not thread.queue.empty():
                self._fail(thread, thread.queue.get_nowait(), dropped)
            for held in self._variables.values():
                if held.state is thread:
                    self._end(held, dropped)
            raise

    def _fail(
        self, thread: _Thread, op: Append | Fork | asyncio.Future[None] | None, error: Exception
    ) -> None:
        thread.failed = thread.failed or error
        if isinstance(op, asyncio.Future):
            if not op.done():
                op.set_exception(thread.failed)
        elif isinstance(op, Fork):
            for child in op.children:
                if not self._threads[child].start.done():
                    self._threads[child].start.set_exception(thread.failed)
        elif op is not None:
            for item in op.items:
                if isinstance(item, Gen | Select):
                    self._end(self._variables[item.key], error)

    def _end(self, held: _Variable, error: BaseException) -> None:
        if not held.future.done():
            held.future.set_exception(error)
        for queue in held.listeners:
            queue.put_nowait(None)

    async def _append(self, thread: _Thread, op: Append) -> None:
        held = thread.conversation
        held.open(op.role)
        try:
            for item in op.items:
                if isinstance(item, Gen):
                    await self._generate(held, item)
                elif isinstance(item, Select):
                    await self._select(held, item)
                else:
                    held.add(await self._text(item))
        finally:
            held.close(op.role)

    async def _wait(self, key: str) -> Any:
        if key.startswith("arg:"):
            return self._given[key.removeprefix("arg:")]
        held = self._variables[key]
        try:
            return await asyncio.shield(held.future)
        except Exception:
            if held.state is not None:
                held.state.told = True
            raise

    async def _text(self, item: Item) -> str:
        if isinstance(item, Const):
            return item.text
        assert isinstance(item, Ref)
        value = await self._wait(item.key)
        held = self._variables.get(item.key)
        return held.text if held is not None and held.state is not None else written(value)

    async def _pieces(self, question: Question) -> list[list[int]]:
        key = question.key
        if key in self._known:
            return self._known[key]
        if key in self._asked:
            return await asyncio.shield(self._asked[key])
        return await self._backend.pieces(question)

    async def _generate(self, held: Conversation, item: Gen) -> None:
        variable = self._variables[item.key]
        pieces = await self._pieces(held.question())
        prompt = held.prompt(pieces)
        if not prompt:
            raise ProgramError("there is nothing to go on from: write some text first")
        answer, constraint = Answer(), None
        async with aclosing(self._backend.generate(prompt, requested(item))) as found:
            async for event in found:
                answer.add(event)
                if isinstance(event, m.Finished) and event.index == 0:
                    constraint = event.constraint
                text = getattr(event, "text", "")
                if text and getattr(event, "index", 0) == 0:
                    variable.text += text
                    for queue in variable.listeners:
                        queue.put_nowait(text)
                    new = tuple(getattr(event, "ids", ()))
                    self._tell(e.Delta(variable.path, variable.name, text, new))
        ids, shown, rest = kept(answer)
        held.fill(ids, shown, pieces[-1])
        held.add(rest)
        variable.meta = meta_of(answer, ids, constraint)
        texts = [choice.text for choice in answer.choices]
        values = [read(item.parse, text, self._types) for text in texts]
        self._finish(variable, values if len(values) > 1 else values[0])

    async def _select(self, held: Conversation, item: Select) -> None:
        variable = self._variables[item.key]
        asked = [self._pieces(held.question(choice)) for choice in item.choices]
        prompts = [held.prompt(pieces) for pieces in await asyncio.gather(*asked)]
        start, scores = await scored(self._backend, prompts)
        chosen = best(item, [ids[start:] for ids in prompts], scores)
        variable.text = text = item.choices[chosen]
        held.add(text)
        sums = {c: sum(found) for c, found in zip(item.choices, scores, strict=True)}
        variable.meta = e.Meta(ids=tuple(prompts[chosen][start:]), scores=sums)
        self._finish(variable, text)

    def _finish(self, held: _Variable, value: Any) -> None:
        held.future.set_result(value)
        for queue in held.listeners:
            queue.put_nowait(None)
        self._tell(e.Done(held.path, held.name, value, held.meta))

    def _tell(self, event: e.Event) -> None:
        if self.events is not None:
            self.events.put_nowait(event)

    # -- calls

    async def _call(self, op: Call, held: _Variable) -> None:
        try:
            args = [
                arg.value if isinstance(arg, Plain) else await self._wait(arg.key)
                for arg in op.args
            ]
            value = await self._tried(op, args)
        except asyncio.CancelledError:
            self._end(held, ProgramError("the call was cancelled"))
            raise
        except Exception as error:
            self._end(held, error)
            self._tell(e.Called(op.function, False))
        else:
            held.future.set_result(value)
            self._tell(e.Called(op.function, True))

    async def _tried(self, op: Call, args: list[Any]) -> Any:
        fn = self._functions[op.function]
        for left in range(op.retries, -1, -1):
            try:
                async with asyncio.timeout(op.timeout):
                    if inspect.iscoroutinefunction(fn):
                        return await fn(*args)
                    value = await asyncio.to_thread(fn, *args)
                    return await value if inspect.isawaitable(value) else value
            except Exception:
                if not left:
                    raise
        raise AssertionError("a range that counts down to 0 is not empty")
