"""Bounds on what a client may make the HTTP parser hold or do: sizes, numbers, and time.

uvicorn's parser keeps a head until it is whole, whatever its size, waits for heads and bodies for
ever, and queues any number of pipelined requests; this is the same protocol with an end to each.
The size of a body is bounded where it is read. Knows no routes.
"""

from __future__ import annotations

import asyncio
from typing import Any, NoReturn

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes of request line and headers, and again of trailers
MAX_HEADERS = 256
MAX_PIPELINED = 16  # requests waiting behind the one that is being answered
MAX_PIECES = 1 << 16  # chunks of a body: a chunk costs time, however small it is
HEAD_S = 20.0  # for sending a head
BODY_S = 60.0  # for sending a body
LINGER_S = 5.0  # for sending the rest of a body that was answered before it was whole
CLOSE_S = 30.0  # for reading the end of what was sent
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n"
_TOO_MANY = b"HTTP/1.1 429 Too Many Requests\r\n"
_TOO_SMALL = b"HTTP/1.1 413 Content Too Large\r\n"
_EMPTY = b"content-length: 0\r\nconnection: close\r\n\r\n"


class _Refused(Exception):
    """Ends the parser's work on what has arrived."""


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head beyond its bounds, 408 to what is not there in time, and closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._heads = 0  # whole ones so far
        self._head = 0  # bytes of the one that is coming, less those read together with another
        self._fields = 0  # bytes of its headers and trailers
        self._pieces = 0
        self._late: asyncio.TimerHandle | None = None
        self._abort: asyncio.TimerHandle | None = None

    @property
    def unheard(self) -> bool:
        """Whether no request came yet, or the answer to one is still missing."""
        return not self._heads or self.cycle is None or not self.cycle.response_complete

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(HEAD_S)

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        if self._abort is not None:
            self._abort.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head and self._late is None:
            self._expect(HEAD_S)
        before, behind = self._heads, not self._in_head
        super().data_received(data)
        # Data that ends a body are not of a head, however large its last piece.
        if self._in_head and self._heads == before and not behind:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(_TOO_LARGE)

    def on_message_begin(self) -> None:
        self._fields = self._pieces = 0
        super().on_message_begin()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._fields > MAX_HEAD:
            self._stop(_TOO_LARGE)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if len(self.pipeline) >= MAX_PIPELINED:
            self._stop(_TOO_MANY)
        self._in_head, self._head = False, 0
        self._heads += 1
        self._arrived()
        self._expect(BODY_S)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._pieces += 1
        if self._pieces > MAX_PIECES:
            self._stop(_TOO_SMALL)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._in_head = True
        self._arrived()
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if not self._in_head and self.cycle.response_complete and not self.transport.is_closing():
            self._arrived()
            self._expect(min(LINGER_S, BODY_S))

    def handle_websocket_upgrade(self) -> None:
        self._arrived()
        super().handle_websocket_upgrade()

    def send_400_response(self, msg: str) -> None:
        if not self.transport.is_closing():
            super().send_400_response(msg)
            self._end()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._end()

    def _expect(self, within_s: float) -> None:
        self._late = self.loop.call_later(within_s, self._missing, within_s)

    def _missing(self, within_s: float) -> None:
        self._late = None
        if self.flow.read_paused:  # we don't read, so nothing can arrive
            self._expect(within_s)
        else:
            self._refuse(_TOO_LATE)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _stop(self, status: bytes) -> NoReturn:
        self._refuse(status)
        raise _Refused

    def _refuse(self, status: bytes) -> None:
        self._arrived()
        if not self.transport.is_closing():
            cycle = self.cycle
            # While a body is missing the newest request is the one refused.
            answering = cycle is not None and (
                cycle.response_started if not self._in_head else not cycle.response_complete
            )
            if not answering and not self.pipeline:
                self.transport.write(status + _EMPTY)
            self.transport.close()
            self._end()

    def _end(self) -> None:
        """A closed connection goes once all is sent; to who doesn't read, that would be never."""
        if self._abort is None:
            self._abort = self.loop.call_later(CLOSE_S, self.transport.abort)
