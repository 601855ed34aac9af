"""A server in this process around the echoing engine, and what tests of it share."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

from spec_serve.api import messages as m
from spec_serve.api.server import Server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.client import Client
from tests.api.echo import ByteTokens, Echo
from tests.api.hosted import hosted

PLACE = "thread"  # or "process": the engine is reached as one in a process of its own is
CODECS = (m.JSON, m.MSGPACK)
SETTINGS = ServeSettings(
    port=0, grpc_port=None, model_name="echo", drain_s=5.0, generation_config={}
)


@asynccontextmanager
async def served(
    engine: Echo | None = None, **changes: Any
) -> AsyncIterator[tuple[Server, str]]:
    """The server and the address of its WebSocket. changes: of SETTINGS."""
    made = engine or Echo()
    behind = hosted(made) if PLACE == "process" else made
    server = Server(behind, ByteTokens(), replace(SETTINGS, **changes))
    try:
        await server.start()
        yield server, server.addresses()[0]
    finally:
        await server.close()


async def collect(client: Client, **request: Any) -> tuple[str, list[Any]]:
    events = [event async for event in client.generate(**request)]
    text = "".join(event.text for event in events if isinstance(event, m.Delta))
    return text, events


async def until(holds: Any) -> None:
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.01)
