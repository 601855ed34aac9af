"""A small WebSocket client: many generations at once over one socket.

Speaks api/messages.py and nothing else; used by tests, benches and the terminal chat. Imports no
torch and knows no models.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Self

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from spec_serve.api import messages as m

GenerationEvent = m.Started | m.Delta | m.PromptLogprobs | m.Finished


class ServerError(RuntimeError):
    """The server refused a request or lost it; see `code` and `param` (the field)."""

    def __init__(self, error: m.Error) -> None:
        super().__init__(error.message)
        self.code, self.param, self.retryable = error.code, error.param, error.retryable


class ConnectionLost(ConnectionError):
    """The socket closed while a generation ran; `code` is the close code, if there was one."""

    def __init__(self, code: int | None) -> None:
        super().__init__(f"the connection closed (code {code})")
        self.code = code


class Client:
    """`async with Client(url) as client`. codec: messages.MSGPACK or messages.JSON."""

    def __init__(self, url: str, codec: str = m.MSGPACK, origin: str | None = None) -> None:
        self.url = url
        self.hello: m.Hello | None = None
        self.draining = False
        self.errors: list[m.Error] = []  # those that belong to no generation
        self._codec = m.Codec(codec)
        self._origin = origin
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._queues: dict[str, asyncio.Queue[m.Server | None]] = {}
        self._pongs: asyncio.Queue[m.Pong] = asyncio.Queue()
        self._ids = itertools.count()
        self._lost: int | None = None

    async def __aenter__(self) -> Self:
        self._socket = await connect(
            self.url,
            subprotocols=[Subprotocol(self._codec.name)],
            origin=self._origin,  # type: ignore[arg-type]
            compression=None,
            max_size=None,
            proxy=None,
        )
        first = self._codec.server_message(await self._socket.recv())
        if not isinstance(first, m.Hello):
            raise ConnectionLost(None)
        self.hello = first
        self._reader = asyncio.create_task(self._read())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        assert self._socket is not None and self._reader is not None
        await self._socket.close()
        await self._reader

    async def generate(
        self,
        *,
        prompt: str | None = None,
        messages: list[dict[str, Any]] | None = None,
        token_ids: list[int] | None = None,
        gen: str = "",
        **options: Any,
    ) -> AsyncIterator[GenerationEvent]:
        """Events of one generation as they come; options: further fields of `Generate`.

        Leaving the loop early cancels the generation. Raises BadMessage for a request that breaks
        the schema, ServerError, ConnectionLost.
        """
        gen = gen or f"g{next(self._ids)}"
        inputs = {"prompt": prompt, "messages": messages, "token_ids": token_ids}
        given = {name: value for name, value in inputs.items() if value is not None}
        request = m.generate({"gen": gen, **given, **options})
        queue: asyncio.Queue[m.Server | None] = asyncio.Queue()
        if gen in self._queues:
            raise ValueError(f"gen: {gen!r} is already running")
        self._queues[gen] = queue
        over = False
        try:
            await self._say(request)
            while not over:
                message = await queue.get()
                if message is None:
                    over = True
                    raise ConnectionLost(self._lost)
                if isinstance(message, m.Error):
                    over = True
                    raise ServerError(message)
                assert isinstance(message, GenerationEvent)
                over = isinstance(message, m.Finished) and message.last
                yield message
        finally:
            if over:
                self._queues.pop(gen, None)
            elif self._lost is None:
                await self._say(m.Cancel(gen))

    async def cancel(self, gen: str) -> None:
        """End a generation; its Finished still comes."""
        await self._say(m.Cancel(gen))

    async def ping(self) -> m.Pong:
        """One round trip."""
        await self._say(m.Ping(asyncio.get_running_loop().time()))
        return await self._pongs.get()

    def abort(self) -> None:
        """Drop the connection without a word, as a crash would."""
        assert self._socket is not None
        self._socket.transport.abort()

    async def send_raw(self, frame: bytes | str) -> None:
        """Send a frame as it is, for tests of a server's manners."""
        assert self._socket is not None
        await self._socket.send(frame)

    async def _say(self, message: m.Client) -> None:
        assert self._socket is not None
        frame = self._codec.encode(message)
        try:
            await self._socket.send(frame.decode() if self._codec.text else frame)
        except ConnectionClosed as closed:
            raise ConnectionLost(closed.rcvd.code if closed.rcvd else None) from None

    async def _read(self) -> None:
        assert self._socket is not None
        try:
            while True:
                self._take(self._codec.server_message(await self._socket.recv()))
        except ConnectionClosed as closed:
            self._lost = closed.rcvd.code if closed.rcvd else 1006
        for queue in self._queues.values():
            queue.put_nowait(None)

    def _take(self, message: m.Server) -> None:
        if isinstance(message, m.Pong):
            self._pongs.put_nowait(message)
            return
        if isinstance(message, m.Draining):
            self.draining = True
            return
        gen = None if isinstance(message, m.Hello | m.Resumed) else message.gen
        queue = self._queues.get(gen) if gen is not None else None
        if queue is not None:
            queue.put_nowait(message)
            # A generation whose reader left early is forgotten with its last message.
            if isinstance(message, m.Error) or (isinstance(message, m.Finished) and message.last):
                assert gen is not None
                self._queues.pop(gen, None)
        elif isinstance(message, m.Error):
            self.errors.append(message)
