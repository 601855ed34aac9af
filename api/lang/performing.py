"""What the operations of a state do: text, `gen`, `select`, `cond`, `loop`, calls.

A state's operations are done one after the other; what else runs meanwhile is run.py's business.
Knows no syntax.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from typing import Any

from spec_serve.api import messages as m
from spec_serve.client.answers import Answer
from spec_serve.lang import events as e
from spec_serve.lang.backend import Backend
from spec_serve.lang.calling import called
from spec_serve.lang.chains import Chain, Link, Places, links
from spec_serve.lang.conversation import Question
from spec_serve.lang.generating import kept, meta_of, requested
from spec_serve.lang.healing import healed
from spec_serve.lang.parts import (
    Append,
    Body,
    Call,
    Cond,
    Const,
    Gen,
    Item,
    Loop,
    Op,
    Plain,
    ProgramError,
    Ref,
    Select,
)
from spec_serve.lang.scoring import best, common, scored
from spec_serve.lang.values import read, written
from spec_serve.lang.variables import Thread, Variable, keys

MOST_DONE = 100_000  # operations of one run: loops within loops come to an end
AGAIN = 16  # tokens that states of a fork rather wait for than compute each for itself
MOST_CHARS = 64 << 20  # of text written into states by one run

# A call, its number, and the numbers of what its arguments refer to: None = they say it themselves.
Far = Callable[[Call, int, list[int | None]], Awaitable[Any]]


class Doing:
    """Operations of one run. far: makes the calls of functions that are not here.

    known, asked: pieces by Question.key, here or on their way. given: arguments by name.
    """

    def __init__(
        self,
        backend: Backend,
        known: Mapping[bytes, list[list[int]]],
        given: Mapping[str, Any],
        events: asyncio.Queue[e.Event | None] | None,
        far: Far | None,
    ) -> None:
        self._backend, self._known, self._given, self._far = backend, known, given, far
        self._events = events
        self._calls: set[asyncio.Task[None]] = set()
        self._done = self._chars = 0
        self._numbers = itertools.count()
        self.asked: dict[bytes, asyncio.Task[list[list[int]]]] = {}
        self.functions: dict[str, Callable[..., Any]] = {}
        self.types: dict[str, Any] = {}
        self.variables: dict[str, Variable] = {}
        self.places: Places = {}  # what stands behind each `gen`, where that is known

    # -- values

    def found(self, thread: Thread | None, key: str) -> Variable:
        """Who has a key's value, for what a state does now."""
        while thread is not None and key not in thread.frame and key in thread.before:
            key = thread.before[key]
        if thread is not None and key in thread.frame:
            return thread.frame[key]
        return self.variables[key]

    async def wait(self, key: str, thread: Thread | None = None) -> Any:
        """A value. Raises what went wrong."""
        if key.startswith("arg:"):
            return self._given[key.removeprefix("arg:")]
        return await _of(self.found(thread, key))

    async def text(self, item: Item, thread: Thread) -> str:
        """Of a constant, or of a value once it is there."""
        if isinstance(item, Const):
            return item.text
        assert isinstance(item, Ref)
        value = await self.wait(item.key, thread)
        if not item.key.startswith("arg:"):
            held = self.found(thread, item.key)
            if held.state is not None:
                return held.text
        return written(value)

    async def pieces(self, question: Question) -> list[list[int]]:
        """Ids, known before, on their way, or asked for."""
        key = question.key
        if key in self._known:
            return self._known[key]
        if key in self.asked:
            return await asyncio.shield(self.asked[key])
        return await self._backend.pieces(question)

    def tell(self, event: e.Event) -> None:
        """An event, if anybody listens."""
        if self._events is not None:
            self._events.put_nowait(event)

    def _new(self, thread: Thread, key: str) -> Variable:
        """The value of a key that is about to be written."""
        held = self.variables[key]
        if not thread.depth:
            return held
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        future.add_done_callback(lambda done: done.cancelled() or done.exception())
        made = Variable(
            future, held.path, held.name, held.state, listeners=held.listeners, within=True, key=key
        )
        thread.frame[key] = made
        return made

    def _finish(self, held: Variable, value: Any, many: bool = False) -> None:
        held.number = next(self._numbers)
        held.future.set_result(value)
        held.hush()
        self.tell(e.Done(held.path, held.name, value, held.meta, held.key, held.number, many))

    # -- operations

    async def perform(self, thread: Thread, op: Op) -> None:
        """Do it to its end; a call only begins."""
        self._count()
        if isinstance(op, Append):
            await self._append(thread, op)
        elif isinstance(op, Cond):
            case = await self.text(Ref(op.on), thread)
            async with self._framed(thread, op):
                await self._body(thread, op.cases.get(case, op.other))
        elif isinstance(op, Loop):
            async with self._framed(thread, op):
                for _ in range(op.most):
                    self._count()
                    await asyncio.sleep(0)  # bodies that wait for nothing let others run, too
                    await self._body(thread, op.body)
                    if op.end and await self.text(Ref(op.end), thread) in op.until:
                        break
        else:
            assert isinstance(op, Call), "states fork outside of bodies only"
            task = asyncio.create_task(self.call(op, self._new(thread, op.key), thread))
            self._calls.add(task)
            task.add_done_callback(self._calls.discard)

    def _count(self) -> None:
        self._done += 1
        if self._done > MOST_DONE:
            raise ProgramError(f"more than {MOST_DONE} operations in one run")

    @asynccontextmanager
    async def _framed(self, thread: Thread, op: Cond | Loop) -> AsyncIterator[None]:
        """Around bodies: their keys begin as what they stand for, and have their values then."""
        own = keys(op)
        thread.before.update(op.before)
        for key in own:
            thread.frame.pop(key, None)
        thread.depth += 1
        try:
            yield
        finally:
            thread.depth -= 1
        for key in own:
            if key in thread.frame:
                continue
            if key in thread.before:
                thread.frame[key] = self.found(thread, thread.before[key])
            else:
                thread.depth += 1
                self._new(thread, key).future.set_result(None)
                thread.depth -= 1
        if not thread.depth:
            for key in own:
                self.variables[key].take(thread.frame[key])
            thread.frame.clear()
            thread.before.clear()

    async def _body(self, thread: Thread, body: Body) -> None:
        """Its operations, until the calls among them are over."""
        begun = []
        for op in body.ops:
            await self.perform(thread, op)
            if isinstance(op, Call):
                begun.append(thread.frame[op.key].future)
        await asyncio.gather(*begun, return_exceptions=True)
        made = {key: self.found(thread, last) for key, last in body.carry.items()}
        thread.frame.update(made)

    async def _append(self, thread: Thread, op: Append) -> None:
        held = thread.conversation
        held.open(op.role)
        try:
            for item in op.items:
                if isinstance(item, Gen):
                    await self._generate(thread, item)
                elif isinstance(item, Select):
                    await self._select(thread, item)
                else:
                    text = await self.text(item, thread)
                    self._chars += len(text)
                    if self._chars > MOST_CHARS:
                        raise ProgramError(f"more than {MOST_CHARS} characters in one run")
                    held.add(text)
        finally:
            held.close(op.role)

    async def _generate(self, thread: Thread, item: Gen) -> None:
        held, variable = thread.conversation, self._new(thread, item.key)
        cut, begun = 0, ""
        if item.heal:
            pieces, cut, begun = await healed(self.pieces, held)
        else:
            pieces = await self.pieces(held.question())
        prompt = held.prompt(pieces, cut)
        if not prompt:
            raise ProgramError("there is nothing to go on from: write some text first")
        answer, constraint, hidden = Answer(), None, len(begun)
        chain = thread.chain
        if chain is None or not chain.brings(item, prompt):
            await thread.unlink()
            ahead = await self._ahead(thread, item, pieces[-1])
            options = requested(item, begun, cut)
            chain = thread.chain = Chain(self._backend, prompt, options, ahead)
        async with self._turn(thread, prompt) as computed:
            async for event in chain.events():
                answer.add(event)
                if isinstance(event, m.Delta):
                    computed()
                if isinstance(event, m.Finished) and event.index == 0:
                    constraint = event.constraint
                if not isinstance(event, m.Delta) or event.index:
                    continue
                text, hidden = event.text[hidden:], max(0, hidden - len(event.text))
                if text:
                    variable.text += text
                    for queue in variable.listeners:
                        queue.put_nowait(text)
                    told = e.Delta(variable.path, variable.name, text, tuple(event.ids))
                    self.tell(told)
        ids, shown, rest = kept(answer)
        chain.kept(prompt + ids)
        thread.known = len(prompt) + len(ids)
        held.fill(ids, shown[len(begun) :], pieces[-1], cut)
        held.add(rest)
        variable.meta = meta_of(answer, ids, constraint)
        texts = [choice.text[len(begun) :] for choice in answer.choices]
        values = [read(item.parse, text, self.types) for text in texts]
        many = len(values) > 1
        self._finish(variable, values if many else values[0], many)

    async def _ahead(self, thread: Thread, item: Gen, piece: list[int]) -> list[Link]:
        """What can be part of this generation's request."""
        place = self.places.get(item.key)
        if place is None or not getattr(self._backend, "fuses", False):
            return []

        def known(ref: Ref) -> str | None:
            if ref.key.startswith("arg:"):
                return written(self._given[ref.key.removeprefix("arg:")])
            held = self.found(thread, ref.key)
            if not held.future.done() or held.future.cancelled() or held.future.exception():
                return None
            return held.text if held.state is not None else written(held.future.result())

        return await links(place, thread.conversation, piece, known, self.pieces)

    async def _select(self, thread: Thread, item: Select) -> None:
        held, variable = thread.conversation, self._new(thread, item.key)
        asked = [self.pieces(held.question(choice)) for choice in item.choices]
        prompts = [held.prompt(pieces) for pieces in await asyncio.gather(*asked)]
        start = common(prompts)
        async with self._turn(thread, prompts[0][:start]):
            scores = await scored(self._backend, prompts, start)
        thread.known = start
        chosen = best(item, [ids[start:] for ids in prompts], scores)
        variable.text = text = item.choices[chosen]
        held.add(text)
        sums = {c: sum(found) for c, found in zip(item.choices, scores, strict=True)}
        variable.meta = e.Meta(ids=tuple(prompts[chosen][start:]), scores=sums)
        self._finish(variable, text)

    @asynccontextmanager
    async def _turn(self, thread: Thread, prompt: list[int]) -> AsyncIterator[Callable[[], None]]:
        """Around a state's request: after a fork the first one computes what all begin with.

        What is given is to be called once the prompt is computed.
        """
        kin, thread.kin = thread.kin, None
        if kin is None:
            yield lambda: None
        elif kin.lead is None:
            kin.lead = prompt
            try:
                yield kin.begun.set
            finally:
                kin.begun.set()
        else:
            if common([kin.lead, prompt]) - kin.known >= AGAIN:
                await kin.begun.wait()
            yield lambda: None

    def call(
        self, op: Call, held: Variable, thread: Thread | None = None
    ) -> Coroutine[Any, Any, None]:
        """A call, to be run; waits for its arguments, which are those of this moment."""
        args: list[Any] = []
        for arg in op.args:
            if isinstance(arg, Plain):
                args.append(arg.value)
            elif arg.key.startswith("arg:"):
                args.append(self._given[arg.key.removeprefix("arg:")])
            else:
                args.append(self.found(thread, arg.key))
        held.number = next(self._numbers)
        return self._call(op, held, args)

    async def _call(self, op: Call, held: Variable, args: list[Any]) -> None:
        try:
            given = [await _of(arg) if isinstance(arg, Variable) else arg for arg in args]
            fn = self.functions.get(op.function)
            if fn is None and self._far is not None:
                numbers = [arg.number if isinstance(arg, Variable) else None for arg in args]
                value = await self._far(op, held.number, numbers)
            else:
                value = await called(op, self.functions[op.function], given)
        except asyncio.CancelledError:
            held.end(ProgramError("the call was cancelled"))
            raise
        except Exception as error:
            held.end(error)
            self.tell(e.Called(op.function, False))
        else:
            held.future.set_result(value)
            self.tell(e.Called(op.function, True))

    async def close(self) -> None:
        """End the calls that bodies began."""
        left = list(self._calls)
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)


async def _of(held: Variable) -> Any:
    try:
        return await asyncio.shield(held.future)
    except Exception:
        if held.state is not None:
            held.state.told = True
        raise
