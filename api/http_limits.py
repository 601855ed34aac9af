"""Bounds on what a client may make the HTTP parser hold: the size of a request's head, and time.

uvicorn's parser keeps a head until it is whole, whatever its size, and waits for it for ever; this
is the same protocol with an end to both. Bodies are bounded where they are read. Knows no routes.
"""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

MAX_HEAD = 64 << 10  # bytes of request line and headers
HEAD_S = 20.0  # for sending them
_TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\n"
_TOO_LATE = b"HTTP/1.1 408 Request Timeout\r\n"
_EMPTY = b"content-length: 0\r\nconnection: close\r\n\r\n"


class BoundedHttp(HttpToolsProtocol):
    """Answers 431 to a head beyond MAX_HEAD and 408 to one not there after HEAD_S, and closes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._in_head = True
        self._heads = 0  # whole ones so far
        self._head = 0  # bytes of the one that is coming, less those read together with another
        self._late: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect()

    def connection_lost(self, exc: Exception | None) -> None:
        self._arrived()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self.transport.is_closing():
            return
        if self._in_head and self._late is None:
            self._expect()
        before = self._heads
        super().data_received(data)
        if self._in_head and self._heads == before:
            self._head += len(data)
            if self._head > MAX_HEAD:
                self._refuse(_TOO_LARGE)

    def on_headers_complete(self) -> None:
        self._in_head, self._head = False, 0
        self._heads += 1
        self._arrived()
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        super().on_message_complete()

    def _expect(self) -> None:
        self._late = self.loop.call_later(HEAD_S, self._refuse, _TOO_LATE)

    def _arrived(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _refuse(self, status: bytes) -> None:
        self._arrived()
        if not self.transport.is_closing():
            if self.cycle is None or self.cycle.response_complete:
                self.transport.write(status + _EMPTY)
            self.transport.close()
