"""What every transport offers, in one place: prepare a request, start it, cancel it, say what runs.

Long texts and chat templates are turned into tokens in a small pool, never on the loop. Who may
come in is asked of limits.py, before anything is read. Knows no wire format; transports bring
`messages.Generate`, an `Outbox` and whose request it is.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path, PurePath
from typing import Any, TypeVar

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import traces
from spec_serve.api.auth import LOCAL, OPEN, Principal
from spec_serve.api.convert import GREEDY, Prepared, SamplingDefaults, TextTokens, to_request
from spec_serve.api.generation import Generation, Outbox
from spec_serve.api.limits import CHARS_PER_TOKEN, Admission, Bounds
from spec_serve.api.link import EngineLink
from spec_serve.api.programs import Registry
from spec_serve.api.session_shelf import Shelf
from spec_serve.spec.compiler import FIRST_S, compiler_of, due, overloaded
from spec_serve.spec.request import RequestError

T = TypeVar("T")

INLINE_CHARS = 2_000  # raw text up to here is read on the loop: quicker than another thread
PREPARE_S = 10.0
# Text beyond so many characters is refused unread: reading it could take seconds for a request that
# would not fit. Ordinary text has about four characters to a token.
MOST_CHARS_PER_TOKEN, CHARS_ALWAYS = 32, 64 << 10
RESTART_MS = 2000  # when to come back while the engine is not there
MAX_GENERATIONS = 32  # at once on one WebSocket


def shown_name(model: str) -> str:
    """What clients see of a target or draft: of a path only its last part."""
    return PurePath(model).name if PurePath(model).is_absolute() or Path(model).exists() else model


class Service:
    """The served model, as transports see it. All methods belong to the loop's thread."""

    def __init__(
        self,
        link: EngineLink,
        tokenizer: TextTokens,
        model: str,
        defaults: SamplingDefaults = GREEDY,
        bounds: Bounds = Bounds(),  # noqa: B008 (frozen)
    ) -> None:
        self.admission = Admission(bounds, link.info.max_rows)
        self.link, self.tokenizer, self.defaults = link, tokenizer, defaults
        # Clients see a name, never where files lie.
        self.model = model or shown_name(link.info.model)
        self.models = (self.model,)
        self.started = time.monotonic()
        self.draining = False
        self.keys = OPEN
        self.shelf: Shelf[Any] = Shelf()  # sessions whose connections may come back
        self.programs = Registry()
        self._pool = ThreadPoolExecutor(2, "tokenize")

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self.link.alive and not self.draining

    async def prepare(
        self,
        wire: m.Generate,
        request_id: str = "",
        deadline: float | None = None,
        principal: Principal = LOCAL,
    ) -> Prepared:
        """Checked and tokenized. Raises RequestError; what has no room is refused unread."""
        arrived = time.monotonic()
        self._there()
        size = self._size(wire)
        ids = len(wire.token_ids or ()) + sum(len(one.token_ids) for one in wire.segments)
        text = size - ids - len(wire.speculation.prediction or "")
        estimate = ids + text // CHARS_PER_TOKEN
        if total := self.admission.bounds.total_s:
            deadline = min(arrived + total, math.inf if deadline is None else deadline)
        with self.admission.reading(principal, wire.sampling.n, estimate):
            made = await self._read(wire, request_id, deadline, size, arrived)
        return replace(made, principal=principal, arrived=arrived)

    def _there(self) -> None:
        if self.draining:
            raise RequestError("", "the server is shutting down", "draining")
        if not self.link.alive:
            error = RequestError("", "the engine is not running at the moment", "overloaded")
            error.retry_after_ms = RESTART_MS
            raise error

    async def _read(
        self, wire: m.Generate, request_id: str, deadline: float | None, size: int, arrived: float
    ) -> Prepared:

        def work() -> Prepared:
            made = to_request(
                wire,
                self.tokenizer,
                defaults=self.defaults,
                models=self.models,
                request_id=request_id,
                deadline=deadline,
            )
            # `submit` checks again, but what is far too long is refused here, beside the loop.
            if not _constrained(made):
                self.link.validate(made.request)
            return made

        inline = wire.messages is None and size <= INLINE_CHARS
        made = work() if inline else await self.aside(work)
        if _constrained(made):
            await self._compile(made, due(arrived))
        return made

    async def _compile(self, made: Prepared, until: float) -> None:
        """Compile a request's constraints beside the texts of others, which don't wait for it.

        Here too where the engine is in another process: its reader must not wait either.
        """
        compiler = compiler_of(self.tokenizer)
        asked = [one.request for one in (made, *made.segments) if one.request.constraint]
        begun = [compiler.begin(one.constraint, until) for one in asked if one.constraint]
        for request, making in zip(asked, begun, strict=True):
            waited = asyncio.wrap_future(making)
            waited.add_done_callback(lambda done: done.cancelled() or done.exception())
            # Others may wait for the same one: it is never cancelled.
            await asyncio.wait((waited,), timeout=max(0.0, until - time.monotonic()))
            if not waited.done() and making.running():  # it has had its turn, and ends in any case
                await asyncio.wait((waited,), timeout=FIRST_S)
            if not waited.done():
                raise overloaded()
            request.compiled = waited.result()
        await self.aside(lambda: self.link.validate(made.request))

    def _size(self, wire: m.Generate) -> int:
        """Characters and ids to be read. Raises RequestError where text is far too long."""
        context = self.link.info.max_context
        most = max(MOST_CHARS_PER_TOKEN * context, CHARS_ALWAYS)
        texts = {
            "prompt": len(wire.prompt or ""),
            "messages": sum(map(_chars, wire.messages or ())) + _encoded(wire.tools),
        }
        for field, size in texts.items():
            if size > most:
                raise RequestError(
                    field,
                    f"{size} characters; at most {most} are read for a context of {context} tokens",
                    "context_length_exceeded",
                )
        given = (wire.token_ids or (), *(one.token_ids for one in wire.segments))
        others = sum(map(len, given)) + len(wire.speculation.prediction or "")
        return sum(texts.values()) + others

    async def aside(self, work: Callable[[], T]) -> T:
        """Run work in the pool. Raises RequestError when it takes too long."""
        running = asyncio.get_running_loop().run_in_executor(self._pool, work)
        try:
            return await asyncio.wait_for(running, PREPARE_S)
        except TimeoutError:
            raise RequestError("", "reading the text took too long", "timeout") from None

    def start(
        self, prepared: Prepared, gen: str, outbox: Outbox, on_over: Callable[[str], None]
    ) -> Generation:
        """Submit; its messages go to the outbox. Raises RequestError."""
        self._there()
        request, cancel = prepared.request, self.link.cancel
        made = Generation(gen, self.model, prepared, outbox, cancel, on_over)
        held = self.admission.enter(prepared.principal, request)
        made.note, held.sink = held.note, made.tell
        request.sink, request.trace = made.take, traces.caller.get()
        try:
            self.link.submit(request)
        except BaseException as error:
            held.drop()
            if isinstance(error, RequestError) and error.field == "id":
                told = str(error).removeprefix("id: ")
                raise RequestError("id", told, "duplicate_id") from None
            raise
        held.submitted()
        if within := self.admission.bounds.first_token_s:
            held.expect(prepared.arrived + within - time.monotonic(), cancel)
        return made

    def abort(self, request_ids: Iterable[str], who: Principal) -> list[str]:
        """End requests by id, those of this key only unless it may administer; which ended."""
        live = self.admission.live
        found = [
            one
            for one in dict.fromkeys(request_ids)
            if one in live and (who.admin or live[one].who == who)
        ]
        for one in found:
            self.link.cancel(one)
        return found

    def revoke(self) -> None:
        """End what runs, or waits to be resumed, for those whom `keys` know no longer."""
        knows = self.keys.knows
        for request_id, held in list(self.admission.live.items()):
            if not knows(held.who):
                self.link.cancel(request_id)
        self.shelf.revoke(knows)

    def close(self) -> None:
        """Let the pool go; what it still does is not waited for."""
        self.shelf.close()
        self._pool.shutdown(wait=False, cancel_futures=True)


def _constrained(made: Prepared) -> bool:
    return any(one.request.constraint is not None for one in (made, *made.segments))


def _chars(message: m.ChatMessage) -> int:
    content = message.content
    size = len(content) if isinstance(content, str) else _encoded(content)
    return size + _encoded(message.tool_calls)


def _encoded(value: object) -> int:
    return len(msgspec.json.encode(value)) if value else 0
