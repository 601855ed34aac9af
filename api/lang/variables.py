"""What a run keeps of each value to come and of each state at work.

Plain records; run.py makes them, performing.py fills them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from spec_serve.lang import events as e
from spec_serve.lang.chains import Chain
from spec_serve.lang.conversation import Conversation
from spec_serve.lang.parts import Append, Call, Cond, Fork, Loop, Op, asked, bodies, every


@dataclass(slots=True, eq=False)
class Variable:
    """A value to come. text: as the model wrote it. state: whose it is, None for a call.

    within: it is one of the values a body gives this name, so that others may follow. key: of the
    operation that gives it, number: counts the values and calls of a run.
    """

    future: asyncio.Future[Any]
    path: str
    name: str
    state: Thread | None
    text: str = ""
    meta: e.Meta = field(default_factory=e.Meta)
    listeners: list[asyncio.Queue[str | None]] = field(default_factory=list)
    within: bool = False
    key: str = ""
    number: int = -1

    def end(self, error: BaseException) -> None:
        """It will not come."""
        if not self.future.done():
            self.future.set_exception(error)
        self.hush()

    def hush(self) -> None:
        """No more text will come."""
        for queue in () if self.within else self.listeners:
            queue.put_nowait(None)

    def take(self, last: Variable) -> None:
        """Be what a body's last one of this name is, or will be if it is a call's."""
        self.text, self.meta, self.number = last.text, last.meta, last.number

        def settle(done: asyncio.Future[Any]) -> None:
            if self.future.done():
                return
            if done.cancelled():
                self.future.cancel()
            elif (error := done.exception()) is not None:
                self.future.set_exception(error)
            else:
                self.future.set_result(done.result())

        if last.future.done():
            settle(last.future)
        else:
            last.future.add_done_callback(settle)
        self.hush()


@dataclass(slots=True, eq=False)
class Kin:
    """States of one fork. known: ids of the parent that its server has computed.

    lead: the prompt of the first of them to ask; begun: set once the server has computed it.
    """

    known: int
    lead: list[int] | None = None
    begun: asyncio.Event = field(default_factory=asyncio.Event)


Queued = Append | Fork | Cond | Loop | asyncio.Future[None] | None


@dataclass(slots=True, eq=False)
class Thread:
    """A state at work. told: its failure has reached the program.

    frame, before: while a body runs, the values its keys have, and what they stand for otherwise.
    known: ids that the server has computed. kin: of the fork it comes from, until it first asks.
    chain: the request that brings the next generation too, if there is one.
    """

    path: str
    start: asyncio.Future[Conversation]
    queue: asyncio.Queue[Queued]
    conversation: Conversation = field(default_factory=Conversation)
    failed: BaseException | None = None
    told: bool = False
    task: asyncio.Task[None] | None = None
    known: int = 0
    kin: Kin | None = None
    depth: int = 0
    frame: dict[str, Variable] = field(default_factory=dict)
    before: dict[str, str] = field(default_factory=dict)
    chain: Chain | None = None

    async def unlink(self) -> None:
        """End the request that what comes next was part of."""
        chain, self.chain = self.chain, None
        if chain is not None:
            await chain.close()


def keys(op: Op) -> list[str]:
    """Of all values that an operation, or those within it, give."""
    found = [item.key for item in asked([op])]
    found += [one.key for one in every([op]) if isinstance(one, Call)]
    found += _carried([op])
    return list(dict.fromkeys(found))


def _carried(ops: Iterable[Op]) -> list[str]:
    return [key for op in every(ops) for body in bodies(op) for key in body.carry]
