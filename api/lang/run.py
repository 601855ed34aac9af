"""Runs a program's operations: a task for each state, one for each call, tokens from a backend.

The same for programs that are interpreted and for graphs. What an operation does is performing.py's
business. Knows no syntax: what it is given are operations (parts.py), in the program's order.
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from typing import Any

from spec_serve.lang import events as e
from spec_serve.lang.backend import Backend
from spec_serve.lang.chains import places
from spec_serve.lang.conversation import Conversation, Question
from spec_serve.lang.parts import Call, Fork, Op, ProgramError, every
from spec_serve.lang.performing import Doing, Far
from spec_serve.lang.state import State, Value
from spec_serve.lang.variables import Kin, Queued, Thread, Variable, keys


class Run:
    """One run of a program; belongs to the loop it is made in. A Sink (state.py).

    known: pieces by Question.key, from a graph. given: arguments by name. events: where they go.
    far: makes the calls of functions that are not known here.
    """

    tracing = False

    def __init__(
        self,
        backend: Backend,
        *,
        known: Mapping[bytes, list[list[int]]] | None = None,
        given: Mapping[str, Any] | None = None,
        events: asyncio.Queue[e.Event | None] | None = None,
        far: Far | None = None,
    ) -> None:
        self._backend = backend
        self._known = known or {}
        self.events = events
        self._loop = asyncio.get_running_loop()
        self._home = threading.get_ident()
        self._numbers = itertools.count(1)
        self._doing = Doing(backend, self._known, given or {}, self.events, far)
        self._variables = self._doing.variables
        self._threads: dict[int, Thread] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        root = self._thread(0, "")
        root.start.set_result(Conversation())

    def root(self) -> State:
        """The state the program is given."""
        return State(self, 0)

    # -- what programs say

    def number(self) -> int:
        """Of a state, a call or a body."""
        return next(self._numbers)

    def owns(self, other: object) -> bool:
        """Values of this run only."""
        return other is self

    def know(self, functions: Mapping[str, Callable[..., Any]], types: Mapping[str, Any]) -> None:
        """Functions and classes by name. Raises ProgramError for two of one name."""
        tables: tuple[tuple[dict[str, Any], Mapping[str, Any]], ...] = (
            (self._doing.functions, functions), (self._doing.types, types),
        )  # fmt: skip
        for held, new in tables:
            for name, made in new.items():
                if held.setdefault(name, made) != made:  # methods are made anew
                    raise ProgramError(f"two different things are called {name!r}")

    def submit(self, op: Op) -> None:
        """Take an operation; from any thread."""
        if threading.get_ident() == self._home:
            self._apply(op)
        else:
            self._loop.call_soon_threadsafe(self._apply, op)

    async def wait(self, value: Value) -> Any:
        """Its value. Raises what went wrong."""
        return await self._doing.wait(value._key)

    async def value(self, key: str) -> Any:
        """The value of a key (parts.py)."""
        return await self._doing.wait(key)

    def get(self, value: Value) -> Any:
        """Its value, in another thread than the loop's."""
        if threading.get_ident() == self._home:
            raise ProgramError("get() would block the loop; await the value instead")
        return asyncio.run_coroutine_threadsafe(self._doing.wait(value._key), self._loop).result()

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
        await self._doing.wait(key)

    def number_of(self, key: str) -> int:
        """The number of a key's last value (Done.number), -1 where it has none."""
        return self._variables[key].number

    def held(self, state: int) -> tuple[str, list[int], list[dict[str, str]]]:
        """Text, ids and messages of a state."""
        held = self._threads[state].conversation
        return held.text, held.ids, held.messages

    # -- the run's own life

    def look_ahead(self, ops: Iterable[Op]) -> None:
        """These operations will come: what follows a generation may be asked for with it."""
        self._doing.places = places(ops)

    def ask_ahead(self, question: Question) -> None:
        """Have a question answered that will probably be asked."""
        key = question.key
        if key not in self._known and key not in self._doing.asked:
            self._doing.asked[key] = self._task(self._backend.pieces(question))

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
        await self._doing.close()
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

    def _thread(self, number: int, path: str) -> Thread:
        made = Thread(path, self._loop.create_future(), asyncio.Queue())
        self._threads[number] = made
        made.task = self._task(self._work(made))
        return made

    def _variable(self, key: str, thread: Thread | None, name: str = "") -> Variable:
        future: asyncio.Future[Any] = self._loop.create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        name = name or key.partition("/")[2].rpartition("#")[0]
        made = Variable(future, "" if thread is None else thread.path, name, thread, key=key)
        self._variables[key] = made
        return made

    def _apply(self, op: Op) -> None:
        if isinstance(op, Call):
            self._task(self._doing.call(op, self._variable(op.key, None, op.function)))
            return
        if isinstance(op, Fork):
            thread = self._threads[op.parent]
            for child, name in zip(op.children, op.names, strict=True):
                self._thread(child, f"{thread.path}.{name}".lstrip("."))
        else:
            thread = self._threads[op.state]
            calls = {one.key: one.function for one in every([op]) if isinstance(one, Call)}
            for key in keys(op):
                made = self._variable(key, None if key in calls else thread, calls.get(key, ""))
                if thread.failed is not None:
                    made.future.set_exception(thread.failed)
        thread.queue.put_nowait(op)

    # -- states at work

    async def _work(self, thread: Thread) -> None:
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
                        kin = Kin(thread.known)
                        for child in op.children:
                            begun = self._threads[child]
                            begun.known, begun.kin = thread.known, kin
                            begun.start.set_result(thread.conversation.copy())
                    else:
                        await self._doing.perform(thread, op)
                except Exception as error:
                    await thread.unlink()
                    self._fail(thread, op, error)
        except asyncio.CancelledError:
            dropped = ProgramError("the state was dropped")
            thread.failed = dropped
            while not thread.queue.empty():
                self._fail(thread, thread.queue.get_nowait(), dropped)
            for held in self._variables.values():
                if held.state is thread:
                    held.end(dropped)
            raise
        finally:
            await thread.unlink()

    def _fail(self, thread: Thread, op: Queued, error: Exception) -> None:
        thread.failed = thread.failed or error
        if isinstance(op, asyncio.Future):
            if not op.done():
                op.set_exception(thread.failed)
        elif isinstance(op, Fork):
            for child in op.children:
                if not self._threads[child].start.done():
                    self._threads[child].start.set_exception(thread.failed)
        elif op is not None:
            for key in keys(op):
                self._variables[key].end(error)
            for one in thread.frame.values():
                one.end(error)
