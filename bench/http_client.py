"""A small HTTP/1.1 client for load: kept-alive connections, answers read as they come.

Parses with httptools on asyncio's transports. Knows requests, statuses and lines; what they mean is
its caller's business. No redirects, no compression, no proxies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncGenerator
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import httptools

HIGH_WATER = 1 << 20  # bytes unread, from which on nothing more is taken from the socket


class HttpClient:
    """Connections to one server. base: http(s)://host[:port][/prefix], before every path.

    api_key: sent with every request. Any number of requests at once, each on its own connection.
    """

    def __init__(
        self, base: str, *, api_key: str | None = None, tls: ssl.SSLContext | None = None
    ) -> None:
        parts = urlsplit(base)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"url: {base!r} is not an address such as http://127.0.0.1:8000")
        secure = parts.scheme == "https"
        self._tls = (tls or ssl.create_default_context()) if secure else None
        self._host, self._port = parts.hostname, parts.port or (443 if secure else 80)
        self._prefix = parts.path.rstrip("/")
        lines = [f"host: {parts.netloc.rpartition('@')[2]}", "accept: */*"]
        if api_key:
            lines.append(f"authorization: Bearer {api_key}")
        self._head = "\r\n".join(lines)
        self._idle: list[_Connection] = []
        self._open: set[_Connection] = set()

    async def ask(self, method: str, path: str, body: bytes = b"") -> Answer:
        """Send a request; the answer once its head is there. Raises OSError.

        The answer is to be used as a context: leaving it unread closes its connection.
        """
        head = f"{method} {self._prefix}{path} HTTP/1.1\r\n{self._head}\r\n"
        if body:
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n"
        while True:
            kept = bool(self._idle)
            connection = self._idle.pop() if kept else await self._connect()
            answer = Answer(self, connection)
            try:
                await connection.begin(answer, f"{head}\r\n".encode() + body)
                return answer
            except ConnectionError:
                connection.drop()
                if not kept:  # else the server had closed it meanwhile
                    raise
            except BaseException:
                connection.drop()
                raise

    async def close(self) -> None:
        """Close all connections."""
        self._idle.clear()
        for connection in list(self._open):
            connection.drop()
            await connection.gone.wait()

    async def _connect(self) -> _Connection:
        loop = asyncio.get_running_loop()
        _, made = await loop.create_connection(
            lambda: _Connection(self._open), self._host, self._port, ssl=self._tls
        )
        return made

    def rest(self, connection: _Connection) -> None:
        """A connection whose answer was read to its end."""
        if connection.usable:
            self._idle.append(connection)


class Answer:
    """An answer as it comes. status; headers with lower-case names; body by `read` or `lines`."""

    def __init__(self, client: HttpClient, connection: _Connection) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self.complete = False
        self._client, self._connection = client, connection

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.complete:
            self._client.rest(self._connection)
        else:
            self._connection.drop()

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Pieces of the body. Raises ConnectionError where it is cut short."""
        while piece := await self._connection.next():
            yield piece

    async def read(self) -> bytes:
        """The whole body."""
        return b"".join([piece async for piece in self.chunks()])

    async def lines(self) -> AsyncGenerator[bytes, None]:
        """Lines of the body, without their ends."""
        rest = b""
        async for piece in self.chunks():
            *whole, rest = (rest + piece).split(b"\n")
            for line in whole:
                yield line.removesuffix(b"\r")
        if rest:
            yield rest


class _Connection(asyncio.Protocol):
    """One connection with one answer at a time; also httptools' callbacks."""

    def __init__(self, open_ones: set[_Connection]) -> None:
        self.usable = True
        self.gone = asyncio.Event()
        self._open_ones = open_ones
        self._answer: Answer | None = None
        self._parser: Any = None
        self._transport: asyncio.Transport | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pieces: list[bytes] = []
        self._size = 0
        self._headed = False
        self._lost: Exception | None = None

    async def begin(self, answer: Answer, request: bytes) -> None:
        """Send a request and wait for the head of its answer."""
        if self._lost is not None or self._transport is None:
            raise ConnectionResetError("the connection was closed")
        self._answer, self._headed = answer, False
        self._forget()  # what came of an answer that nobody read to its end
        self._parser = httptools.HttpResponseParser(self)
        self._transport.write(request)
        while not self._headed:
            await self._wait()

    async def next(self) -> bytes:
        """What came of the body; b"" at its end."""
        while not self._pieces:
            assert self._answer is not None
            if self._answer.complete:
                return b""
            await self._wait()
        made = b"".join(self._pieces)
        self._forget()
        return made

    def _forget(self) -> None:
        self._pieces.clear()
        if self._size > HIGH_WATER and self._transport is not None:
            self._transport.resume_reading()
        self._size = 0

    def drop(self) -> None:
        """Close without a word."""
        self.usable = False
        if self._transport is not None:
            self._transport.abort()

    async def _wait(self) -> None:
        if self._lost is not None:
            raise ConnectionResetError("the connection was closed") from self._lost
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    # asyncio's side

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._open_ones.add(self)

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._lost = ConnectionError(f"this is no HTTP: {error}")
            self.drop()
        self._wake()

    def connection_lost(self, error: Exception | None) -> None:
        self.usable = False
        self.gone.set()
        self._open_ones.discard(self)
        answer = self._answer
        # Without a length the end of the connection is the end of the body.
        open_ended = answer is not None and self._headed and not answer.complete and not (
            {"content-length", "transfer-encoding"} & set(answer.headers)
        )  # fmt: skip
        if open_ended and answer is not None and error is None:
            answer.complete = True
        else:
            self._lost = self._lost or error or EOFError()
        self._wake()

    # httptools' side

    def on_header(self, name: bytes, value: bytes) -> None:
        """A header of the answer."""
        if self._answer is not None:
            self._answer.headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        """The head is there."""
        if self._answer is not None:
            self._answer.status = self._parser.get_status_code()
            self._headed = True

    def on_body(self, piece: bytes) -> None:
        """A piece of the body."""
        self._pieces.append(piece)
        self._size += len(piece)
        if self._size > HIGH_WATER and self._transport is not None:
            with contextlib.suppress(RuntimeError):
                self._transport.pause_reading()

    def on_message_complete(self) -> None:
        """The body is whole."""
        if self._answer is not None and self._headed:
            self._answer.complete = True
            self.usable = self.usable and self._parser.should_keep_alive()
