"""One generation served by one gRPC call, for every service that offers such a method.

Brings the call's deadline, cancellation and reader together with the service; errors end the call
with a status. What is written for a message is the method's own business.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, NoReturn

from spec_serve.api import grpc_convert as convert
from spec_serve.api import messages as m
from spec_serve.api.convert import Prepared
from spec_serve.api.generation import Numbered, Outbox, failure
from spec_serve.api.grpc_guard import caller
from spec_serve.api.grpc_reader import Patience
from spec_serve.api.service import Service
from spec_serve.spec.request import RequestError

MAX_ID = 128  # characters of a request id
Said = m.Started | m.Delta | m.PromptLogprobs | m.Finished
Write = Callable[[Said], Awaitable[None]]
Rename = Callable[[m.Error], m.Error]


class Calls:
    """How many generations are being served by calls, for draining."""

    def __init__(self) -> None:
        self.count = 0


async def abort(context: Any, error: m.Error) -> NoReturn:
    """End the call with an error's status."""
    code, said, trailing = convert.status(error)
    await context.abort(code, said, trailing)
    raise AssertionError("abort raises")


async def refuse(context: Any, error: RequestError, wire: m.Generate | None = None) -> NoReturn:
    """End the call because of a request that can't be served."""
    await abort(context, failure(error, wire=wire))


def bad(error: m.BadMessage) -> m.Error:
    """The error for a message that breaks the schema."""
    return m.Error("invalid_request", str(error), param=error.field or None)


def deadline(context: Any) -> float | None:
    """The call's deadline on the monotonic clock."""
    left = context.time_remaining()
    return None if left is None else time.monotonic() + left


async def generate(
    service: Service,
    calls: Calls,
    context: Any,
    wire: m.Generate,
    request_id: str,
    write: Write,
    rename: Rename = lambda error: error,
    known: Callable[[Prepared], None] = lambda prepared: None,
) -> None:
    """Serve a generation to its end, one `write` per message, in order.

    rename: gives an error's field the name it has in the method's own proto. known: told the
    request before it begins.
    """
    wake = asyncio.Event()
    outbox = Outbox(wake.set)
    try:
        if len(request_id) > MAX_ID:
            raise RequestError("id", f"is longer than {MAX_ID} characters")
        prepared = await service.prepare(wire, request_id, deadline(context), caller.get())
        known(prepared)
        generation = service.start(prepared, wire.gen, outbox, lambda gen: wake.set())
    except RequestError as error:
        await abort(context, rename(failure(error, wire=wire)))
    calls.count += 1
    cancel = partial(service.link.cancel, generation.id)
    patience = Patience(context, lambda: outbox.overflowing, cancel)
    try:
        while True:
            await wake.wait()
            wake.clear()
            for message in outbox.take():
                await _say(context, message, write, rename)
            if generation.over and not len(outbox):
                return
    finally:
        calls.count -= 1
        patience.close()
        if not generation.over:
            cancel()


async def _say(context: Any, message: Numbered, write: Write, rename: Rename) -> None:
    if isinstance(message, m.Error):
        await abort(context, rename(message))
    await write(message)
