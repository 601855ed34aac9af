"""Generations with known text between them, asked for in one request: as segments of the first.

What stands behind a `gen` is followed to the next ones, within a turn and over turns, while all of
it is known; the ids between are those the interpreter would ask for. Each time the model has
written one, the prompt the interpreter would send next is compared with what the server went on
from: where they differ, or it did not go on, the next one is a request of its own. So the tokens
are the interpreter's. Knows no variables.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from spec_serve.api import messages as m
from spec_serve.client.answers import GenerationEvent, ServerError
from spec_serve.lang.backend import Backend
from spec_serve.lang.conversation import Conversation, Question
from spec_serve.lang.generating import requested
from spec_serve.lang.parts import Append, Call, Const, Fork, Gen, Item, Op, Ref, Role, bodies

_OWN = frozenset(m.Segment.__struct_fields__)  # options that hold for one generation
_SHARED = ("speculation", "priority", "cache_salt")  # and those they have in common
_LATE = ("timeout_s",)  # of each by itself, which one request can't keep


@dataclass(frozen=True, slots=True)
class Mark:
    """The begin or end of a turn."""

    role: Role
    begin: bool


Steps = list[Mark | Item | None]  # None: what follows is not known
Places = dict[str, tuple[Steps, int]]  # of each gen by its key


def places(ops: Iterable[Op]) -> Places:
    """Where each `gen` stands among what its state does."""
    found: Places = {}
    _place(ops, False, found)
    return found


def _place(ops: Iterable[Op], body: bool, found: Places) -> None:
    """body: calls begin in their turn there, so that nothing is asked for across them."""
    states: dict[int, Steps] = {}
    for op in ops:
        if isinstance(op, Call):
            if body:
                for steps in states.values():
                    steps.append(None)
            continue
        steps = states.setdefault(op.parent if isinstance(op, Fork) else op.state, [])
        if not isinstance(op, Append):
            steps.append(None)
            for one in bodies(op):
                _place(one.ops, True, found)
            continue
        steps.append(Mark(op.role, True))
        for item in op.items:
            if isinstance(item, Gen):
                found[item.key] = steps, len(steps)
            steps.append(item)
        steps.append(Mark(op.role, False))


def behind(place: tuple[Steps, int]) -> Iterator[Mark | Const | Ref | Gen]:
    """What can be part of a generation's request, from what follows it on."""
    steps, at = place
    first = steps[at]
    assert isinstance(first, Gen)
    if not _alone(first):
        return
    keys, count = {first.key}, 0
    for step in steps[at + 1 :]:
        if isinstance(step, Gen):
            count += 1
            same = all(step.options.get(name) == first.options.get(name) for name in _SHARED)
            if step.heal or not same or not _alone(step) or count > m.MAX_SEGMENTS:
                return
            keys.add(step.key)
        elif isinstance(step, Ref):
            if step.key in keys:
                return
        elif not isinstance(step, Mark | Const):
            return
        yield step


def _alone(item: Gen) -> bool:
    options = item.options
    several = (options.get("sampling") or {}).get("n", 1) != 1
    return not several and not any(name in options for name in _LATE)


def fused(ops: Iterable[Op]) -> list[list[str]]:
    """Keys of the generations that share a request, where all values are there in time."""
    made: list[list[str]] = []
    seen: set[str] = set()
    for key, place in places(ops).items():
        if key in seen:
            continue
        chain = [key, *(step.key for step in behind(place) if isinstance(step, Gen))]
        seen.update(chain)
        if len(chain) > 1:
            made.append(chain)
    return made


@dataclass(frozen=True, slots=True)
class Link:
    """A further generation, and the ids before it."""

    item: Gen
    ids: list[int]

    @property
    def segment(self) -> dict[str, Any]:
        """As it is asked for."""
        options = {name: value for name, value in requested(self.item).items() if name in _OWN}
        return {"token_ids": self.ids, **options}


async def links(
    place: tuple[Steps, int],
    held: Conversation,
    piece: list[int],
    known: Callable[[Ref], str | None],
    ask: Callable[[Question], Awaitable[list[list[int]]]],
) -> list[Link]:
    """What can follow the generation at `place` in its request.

    held: the state, up to it. piece: the ids before it, behind the last fill. known: the text of a
    value, None where it is not there yet.
    """
    there = held.copy()
    there.fill([], "", piece)
    items: list[Gen] = []
    asked: list[Awaitable[list[list[int]]]] = []
    for step in behind(place):
        if isinstance(step, Gen):
            items.append(step)
            asked.append(ask(there.question()))
            there.fill([], "", [])
        elif isinstance(step, Mark):
            there.open(step.role) if step.begin else there.close(step.role)
        else:
            text = step.text if isinstance(step, Const) else known(step)
            if text is None:
                break
            there.add(text)
    before, made = [*held.pieces, piece], list[Link]()
    found = await asyncio.gather(*asked, return_exceptions=True)
    for item, pieces in zip(items, found, strict=True):
        # What can't be read, or changes earlier turns, is met again when its turn comes.
        if isinstance(pieces, BaseException) or pieces[:-1] != before or not pieces[-1]:
            break
        made.append(Link(item, pieces[-1]))
        before = pieces
    return made


class Chain:
    """One request and what is left of it."""

    def __init__(
        self, backend: Backend, prompt: list[int], options: Mapping[str, Any], ahead: list[Link]
    ) -> None:
        self._backend, self._prompt, self._options = backend, prompt, dict(options)
        self._ahead = list(ahead)
        self._went_on: list[int] = []  # the prompt that the server goes on from
        self._linked = bool(ahead)
        if ahead:
            self._options["segments"] = [link.segment for link in ahead]
        self._events = backend.generate(prompt, dict(self._options))
        self._over = self._begun = False

    def brings(self, item: Gen, prompt: list[int]) -> bool:
        """Whether what comes next is this generation, behind this prompt."""
        if self._over or not self._ahead or self._ahead.pop(0).item.key != item.key:
            return False
        return self._went_on == prompt

    def kept(self, ids: list[int]) -> None:
        """What the state keeps of the generation that is over, all before it included."""
        self._went_on = ids + self._ahead[0].ids if self._ahead else []

    async def events(self) -> AsyncGenerator[GenerationEvent, None]:
        """Of the generation that comes next, as if it were a request of its own."""
        try:
            async for event in self._one():
                yield event
        except (ServerError, m.BadMessage) as error:
            param = error.param if isinstance(error, ServerError) else error.field
            if self._begun or not self._linked or not (param or "").startswith("segments"):
                raise
            # Whatever is wrong with a later one is told when its turn comes.
            self._linked, self._ahead = False, []
            del self._options["segments"]
            self._events = self._backend.generate(self._prompt, self._options)
            async for event in self._one():
                yield event
        if self._over:
            await self.close()

    async def _one(self) -> AsyncGenerator[GenerationEvent, None]:
        async for event in self._events:
            self._begun = True
            end = isinstance(event, m.Finished) and (self._linked or event.last)
            if self._linked and isinstance(event, m.Finished | m.Delta):
                event.index = 0
            self._over = isinstance(event, m.Finished) and event.last
            yield event
            if end:
                return

    async def close(self) -> None:
        """End the request, if it is not over."""
        self._over = True
        await self._events.aclose()
