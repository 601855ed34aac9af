"""An asynchronous client of the WebSocket: many generations over one connection.

Used by the terminal chat, the benches and the tests, and meant to be imported by others: it needs
msgspec and websockets, no torch. Knows the messages and nothing of the server behind them.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from spec_serve.api import messages as m

MAX_FRAME = 8 << 20
Event = m.Started | m.Delta | m.PromptLogprobs | m.Finished


class ServerError(Exception):
    """The server refused a request or lost it. code, param: as in the message `error`."""

    def __init__(self, error: m.Error) -> None:
        super().__init__(f"{error.code}: {error.message}")
        self.code, self.param = error.code, error.param
        self.retryable, self.retry_after_ms = error.retryable, error.retry_after_ms


class Disconnected(ConnectionError):
    """The connection ended while something was expected of it."""


@dataclass(slots=True)
class Answer:
    """One choice, complete. ids is empty unless they were asked for."""

    text: str = ""
    ids: list[int] = field(default_factory=list)
    logprobs: list[m.Logprob] = field(default_factory=list)
    steps: list[m.Step] = field(default_factory=list)
    finished: m.Finished | None = None

    @property
    def reason(self) -> str:
        """stop, length or cancelled."""
        assert self.finished is not None
        return self.finished.reason


class Stream:
    """One generation: iterate over its messages. Leaving its `async with` early cancels it."""

    def __init__(self, client: Client, gen: str) -> None:
        self.gen = gen
        self.over = False
        self._client = client
        self._inbox: asyncio.Queue[Event | Exception] = asyncio.Queue()
        self._seq = 0

    async def cancel(self) -> None:
        """Ask for the end; `finished` with reason cancelled still comes."""
        if not self.over:
            await self._client.send(m.Cancel(self.gen))

    def __aiter__(self) -> AsyncIterator[Event]:
        return self

    async def __anext__(self) -> Event:
        """The next message. Raises ServerError or Disconnected."""
        if self.over and self._inbox.empty():
            raise StopAsyncIteration
        event = await self._inbox.get()
        if isinstance(event, Exception):
            raise event
        return event

    async def __aenter__(self) -> Stream:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with contextlib.suppress(Disconnected):
            await self.cancel()

    def put(self, message: Event | m.Error) -> None:
        """Called by the client's reader, in order."""
        if message.seq is not None and message.seq != self._seq:
            told = f"message {message.seq} of {self.gen} came where {self._seq} was due"
            return self.lose(Disconnected(told))
        self._seq += 1
        if isinstance(message, m.Error):
            return self.lose(ServerError(message))
        if isinstance(message, m.Finished) and message.last:
            self.over = True
        self._inbox.put_nowait(message)

    def lose(self, error: Exception) -> None:
        """Nothing more will come."""
        self.over = True
        self._inbox.put_nowait(error)


class Client:
    """One connection. url: ws://host:port/v1/stream. codec: one of messages.SUBPROTOCOLS.

    `hello` is the server's first message, `complaints` are errors that belong to no generation,
    `draining` is set once the server says that it goes away.
    """

    def __init__(self, url: str, codec: str = m.MSGPACK, origin: str | None = None) -> None:
        self.url = url
        self.hello: m.Hello | None = None
        self.draining: m.Draining | None = None
        self.complaints: list[m.Error] = []
        self._codec = m.Codec(codec)
        self._headers = {"Origin": origin} if origin is not None else {}
        self._socket: ClientConnection | None = None
        self._reader: asyncio.Task[None] | None = None
        self._greeted: asyncio.Future[None] | None = None
        self._streams: dict[str, Stream] = {}
        self._pongs: dict[float, asyncio.Future[m.Pong]] = {}
        self._count = itertools.count(1)

    async def __aenter__(self) -> Client:
        await self.open()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connect and wait for the greeting. Raises OSError, Disconnected or websockets' errors."""
        self._socket = await connect(
            self.url,
            subprotocols=[Subprotocol(self._codec.name)],
            additional_headers=self._headers,
            compression=None,
            max_size=MAX_FRAME,
        )
        self._greeted = asyncio.get_running_loop().create_future()
        self._reader = asyncio.create_task(self._read(self._socket))
        await self._greeted

    async def close(self) -> None:
        """Close the connection; the server cancels what still runs."""
        if self._socket is not None:
            await self._socket.close()
        if self._reader is not None:
            await self._reader

    async def send(self, message: m.Client) -> None:
        """Send any message. Raises Disconnected."""
        frame = self._codec.encode(message)
        await self.send_frame(frame.decode() if self._codec.text else frame)

    async def send_frame(self, frame: bytes | str) -> None:
        """Send a frame as it is: text or binary. Raises Disconnected."""
        if self._socket is None:
            raise Disconnected("the client is not connected")
        try:
            await self._socket.send(frame)
        except ConnectionClosed as error:
            raise Disconnected(str(error)) from error

    async def generate(self, **fields: Any) -> Stream:
        """Start a generation; fields are those of messages.Generate, as plain values.

        Raises messages.BadMessage for what breaks the schema (nothing is sent), Disconnected.
        """
        fields.setdefault("gen", f"g{next(self._count)}")
        wire = m.generate({"type": "generate", **fields})
        if wire.gen in self._streams:
            raise m.BadMessage("gen", f"gen: {wire.gen!r} is already running")
        stream = self._streams[wire.gen] = Stream(self, wire.gen)
        try:
            await self.send(wire)
        except Disconnected:
            self._streams.pop(wire.gen, None)
            raise
        return stream

    async def answers(self, **fields: Any) -> list[Answer]:
        """Generate to the end, one Answer per choice. Raises as `generate`, and ServerError."""
        made: dict[int, Answer] = {}
        async with await self.generate(**fields) as stream:
            async for event in stream:
                if isinstance(event, m.Delta):
                    answer = made.setdefault(event.index, Answer())
                    answer.text += event.text
                    answer.ids += event.ids
                    answer.logprobs += event.logprobs
                    answer.steps += event.steps
                elif isinstance(event, m.Finished):
                    made.setdefault(event.index, Answer()).finished = event
        return [made[index] for index in sorted(made)]

    async def answer(self, **fields: Any) -> Answer:
        """`answers` for one choice."""
        (made,) = await self.answers(**fields)
        return made

    async def ping(self, t: float = 0.0) -> m.Pong:
        """Ask whether the server still answers. Raises Disconnected."""
        waiting = self._pongs.get(t)
        if waiting is None:
            waiting = self._pongs[t] = asyncio.get_running_loop().create_future()
        await self.send(m.Ping(t))
        return await asyncio.shield(waiting)

    async def _read(self, socket: ClientConnection) -> None:
        why = Disconnected("the connection was closed")
        try:
            async for frame in socket:
                self._take(self._codec.server_message(frame))
        except ConnectionClosed as error:
            why = Disconnected(str(error))
        except m.BadMessage as error:
            why = Disconnected(f"the server sent what can't be read: {error}")
            await socket.close(1002)
        if self._greeted is not None and not self._greeted.done():
            self._greeted.set_exception(why)
        for stream in self._streams.values():
            stream.lose(why)
        self._streams.clear()
        for waiting in self._pongs.values():
            waiting.set_exception(why)
        self._pongs.clear()

    def _take(self, message: m.Server) -> None:
        if isinstance(message, m.Hello):
            self.hello = message
            if self._greeted is not None and not self._greeted.done():
                self._greeted.set_result(None)
        elif isinstance(message, m.Pong):
            if (waiting := self._pongs.pop(message.t, None)) is not None:
                waiting.set_result(message)
        elif isinstance(message, m.Draining):
            self.draining = message
        else:
            stream = self._streams.get(message.gen) if message.gen is not None else None
            if stream is not None:
                stream.put(message)
                if stream.over:
                    del self._streams[stream.gen]
            elif isinstance(message, m.Error):
                self.complaints.append(message)
