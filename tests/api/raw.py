"""A WebSocket client that does what it is told, for tests of a server's manners.

Built on `websockets`; knows the messages and no more. Imported by tests only.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed

from spec_serve.api import messages as m


class Raw:
    """One socket. `say` takes a message or a frame, `hear` gives the next message."""

    def __init__(self, socket: ClientConnection, codec: str) -> None:
        self.socket, self.codec = socket, m.Codec(codec)

    async def say(self, message: Any) -> None:
        """Send a message, or a frame as it is."""
        frame = message
        if not isinstance(message, (bytes, str)):
            frame = self.codec.encode(message)
            if self.codec.text:
                frame = frame.decode()
        await self.socket.send(frame)

    async def hear(self) -> Any:
        """The next message; ConnectionClosed at the end."""
        return self.codec.server_message(await asyncio.wait_for(self.socket.recv(), 60))

    async def rest(self, gen: str) -> list[Any]:
        """Messages until the last one of gen."""
        heard: list[Any] = []
        while True:
            heard.append(await self.hear())
            last = heard[-1]
            if getattr(last, "gen", None) == gen and (
                isinstance(last, m.Error) or (isinstance(last, m.Finished) and last.last)
            ):
                return heard

    async def closed(self) -> tuple[int | None, list[Any]]:
        """The close code, and what was said before it."""
        heard: list[Any] = []
        try:
            while True:
                heard.append(await self.hear())
        except ConnectionClosed as error:
            return (error.rcvd.code if error.rcvd else None), heard

    def abort(self) -> None:
        """Vanish, as a crash would."""
        self.socket.transport.abort()


@asynccontextmanager
async def raw(url: str, codec: str = m.JSON, *more: str, **kwargs: Any) -> AsyncIterator[Raw]:
    """A socket of this codec; more: further subprotocols."""
    kwargs = {"compression": None, "max_size": None, "close_timeout": 1, **kwargs}
    socket = await connect(url, subprotocols=[codec, *more], **kwargs)  # type: ignore[list-item]
    try:
        yield Raw(socket, codec)
    finally:
        await socket.close()
