"""What every transport offers, in one place: prepare a request, start it, cancel it, say what runs.

Long texts and chat templates are turned into tokens in a small pool, never on the loop. Knows no
wire format; transports bring `messages.Generate` and an `Outbox`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePath
from typing import TypeVar

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import traces
from spec_serve.api.convert import GREEDY, Prepared, SamplingDefaults, TextTokens, to_request
from spec_serve.api.generation import Generation, Outbox
from spec_serve.api.link import EngineLink
from spec_serve.spec.request import RequestError

T = TypeVar("T")

INLINE_CHARS = 2_000  # raw text up to here is read on the loop: quicker than another thread
PREPARE_S = 10.0
# Text beyond so many characters is refused unread: reading it could take seconds for a request that
# would not fit. Ordinary text has about four characters to a token.
CHARS_PER_TOKEN, CHARS_ALWAYS = 32, 64 << 10
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
    ) -> None:
        self.link, self.tokenizer, self.defaults = link, tokenizer, defaults
        # Clients see a name, never where files lie.
        self.model = model or shown_name(link.info.model)
        self.models = (self.model,)
        self.started = time.monotonic()
        self.draining = False
        self._pool = ThreadPoolExecutor(2, "tokenize")

    @property
    def ready(self) -> bool:
        """Whether new requests are taken."""
        return self.link.alive and not self.draining

    async def prepare(
        self, wire: m.Generate, request_id: str = "", deadline: float | None = None
    ) -> Prepared:
        """Checked and tokenized. Raises RequestError."""
        if self.draining:
            raise RequestError("", "the server is shutting down", "draining")
        size = self._size(wire)

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
            self.link.validate(made.request)
            return made

        if wire.messages is None and size <= INLINE_CHARS:
            return work()
        return await self.aside(work)

    def _size(self, wire: m.Generate) -> int:
        """Characters and ids to be read. Raises RequestError where text is far too long."""
        context = self.link.info.max_context
        most = max(CHARS_PER_TOKEN * context, CHARS_ALWAYS)
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
        others = len(wire.token_ids or ()) + len(wire.speculation.prediction or "")
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
        made = Generation(gen, self.model, prepared, outbox, self.link.cancel, on_over)
        prepared.request.sink, prepared.request.trace = made.take, traces.caller.get()
        try:
            self.link.submit(prepared.request)
        except RequestError as error:
            if error.field == "id":
                raise RequestError("id", str(error).removeprefix("id: "), "duplicate_id") from None
            raise
        return made

    def close(self) -> None:
        """Let the pool go; what it still does is not waited for."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _chars(message: m.ChatMessage) -> int:
    content = message.content
    size = len(content) if isinstance(content, str) else _encoded(content)
    return size + _encoded(message.tool_calls)


def _encoded(value: object) -> int:
    return len(msgspec.json.encode(value)) if value else 0
