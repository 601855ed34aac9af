"""What chat and text completions share on the way out: heads, events of a stream, its end.

A stream begins with the first message of the engine, so that a refusal before it has a status of
its own; a failure after it is one event with `error`, and no [DONE]. Knows no tokens.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from spec_serve.api import messages as m
from spec_serve.api import openai_wire as w
from spec_serve.api.calls import Call, HttpError
from spec_serve.api.generation import Numbered
from spec_serve.api.openai_convert import Asked
from spec_serve.api.openai_run import Run
from spec_serve.api.service import Service
from spec_serve.api.version import __version__

DONE = b"data: [DONE]\n\n"
ALIVE = b": still here\n\n"  # a comment, which readers of events skip
_encode = msgspec.json.Encoder().encode


def event(value: Any) -> bytes:
    """A server-sent event."""
    return b"data: " + _encode(value) + b"\n\n"


def fingerprint(service: Service) -> str:
    """Changes with what computes the answers."""
    info = service.link.info
    what = f"{__version__} {service.model} {info.draft} {info.dtype} {info.device}"
    return "fp_" + hashlib.sha256(what.encode()).hexdigest()[:10]


def head(service: Service, run: Run, asked: Asked) -> dict[str, Any]:
    """What every answer begins with."""
    return {
        "id": run.id,
        "created": int(time.time()),
        "model": asked.wires[0].model or service.model,
        "system_fingerprint": fingerprint(service),
    }


async def send(
    call: Call, run: Run, read: Callable[[Numbered], Iterable[Any]], last: Callable[[], Any]
) -> None:
    """Stream a run. read: a message's chunks; last: the chunk with usage, or None."""
    try:
        async for messages in run.messages():
            chunks = [event(chunk) for message in messages for chunk in read(message)]
            if not call.started:
                await call.stream()
            if chunks or not messages:
                await call.chunk(b"".join(chunks) or ALIVE)
    except HttpError as error:
        if not call.started:
            raise
        await call.chunk(event(error.body()))
        await call.end()
        return
    tail = last()
    await call.chunk(DONE if tail is None else event(tail) + DONE)
    await call.end()


def reason(finished: m.Finished, called: bool = False) -> w.Reason:
    """In OpenAI's words; a call that the limit cut off ended by length."""
    if finished.reason == "length":
        return "length"
    return "tool_calls" if called else "stop"


def matched(finished: m.Finished, wire: m.Generate) -> int | str | None:
    """vLLM's stop_reason: the stop that was asked for; nothing for the model's own end."""
    found = finished.matched
    return found if isinstance(found, str) or found in wire.stop_token_ids else None
