"""picows as uvicorn's WebSocket implementation, on the port that HTTP has.

uvicorn hands an upgraded connection to a class of ours; refusals we answer, the rest picows has.
Its protocol is made by an undocumented constructor, so its version is pinned. Knows handshakes;
frames are the business of picows_socket.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from http import HTTPStatus
from typing import Any

import picows
from picows.picows import WSProtocol  # type: ignore[attr-defined]

from spec_serve.api.picows_socket import MAX_FRAME, Burst, PicowsSocket
from spec_serve.api.websocket_door import Door, Entry, Headers, Refusal, header

PING_S, PONG_S = 20.0, 20.0
READ_BUFFER = 8 << 10

# picows tells of every connection and of every client that breaks the protocol; nobody asked.
_SILENT = logging.Logger("picows", logging.CRITICAL + 1)


def bridge(door: Door) -> Callable[..., Handover]:
    """What uvicorn's `ws` setting takes: called for each upgraded connection."""

    burst = Burst()
    door.service.link.observers.insert(0, burst.flush)

    def made(config: Any, server_state: Any, app_state: Any) -> Handover:
        return Handover(door, server_state.connections, burst)

    return made


class Handover(asyncio.Protocol):
    """Stands between uvicorn's HTTP parser and picows for the length of a handshake."""

    unheard = True  # and so not to be cut off when the port closes, see api/server.py

    def __init__(self, door: Door, connections: set[Any], burst: Burst) -> None:
        self._door, self._connections, self._burst = door, connections, burst
        self._inner: Any = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        self.transport = transport
        self._connections.add(self)

    def data_received(self, data: bytes) -> None:
        """First the head that uvicorn read, then what comes before picows has taken over."""
        if self._inner is not None:
            self._feed(data)
            return
        if self.transport.is_closing():
            return
        target, headers = _head(data)
        entry = self._enter(target, headers)
        if isinstance(entry, Refusal):
            self._refuse(entry)
            return
        socket = PicowsSocket(
            self._door, entry, self.transport, self._connections, self._burst
        )
        self._inner = _protocol(socket, entry)
        self._inner.connection_made(self.transport)
        key = header(headers, b"sec-websocket-key") or ""
        # Not the client's own head: picows takes no more than 16 KiB, and "Upgrade" as the only
        # token of `connection`, where browsers send two.
        self._feed(
            b"GET / HTTP/1.1\r\nconnection: upgrade\r\nupgrade: websocket\r\n"
            b"sec-websocket-version: 13\r\nsec-websocket-key: %b\r\n\r\n" % key.encode("latin-1")
        )
        # uvicorn makes this object the transport's protocol when we return.
        asyncio.get_running_loop().call_soon(self._switch)

    def _enter(self, target: bytes, headers: Headers) -> Entry | Refusal:
        if target.partition(b"?")[0] != self._door.path.encode():
            return Refusal(404, "no such path")
        if header(headers, b"sec-websocket-version") != "13":
            told = "only version 13 of the protocol is spoken"
            return Refusal(426, told, ((b"sec-websocket-version", b"13"),))
        return self._door.enter(headers)

    def _feed(self, data: bytes) -> None:
        while data:
            room = self._inner.get_buffer(-1)
            part = data[: len(room)]
            room[: len(part)] = part
            self._inner.buffer_updated(len(part))
            data = data[len(part) :]

    def _switch(self) -> None:
        self._connections.discard(self)
        transport = self.transport
        if not transport.is_closing():
            # Paused, because loops choose how to read when they begin to.
            transport.pause_reading()
            transport.set_protocol(self._inner)
            transport.resume_reading()

    def _refuse(self, refusal: Refusal) -> None:
        body = refusal.said.encode()
        lines = [
            b"HTTP/1.1 %d %b" % (refusal.status, HTTPStatus(refusal.status).phrase.encode()),
            b"content-type: text/plain; charset=utf-8",
            b"content-length: %d" % len(body),
            b"connection: close",
            *(b"%b: %b" % pair for pair in refusal.headers),
            b"",
            body,
        ]
        self.transport.write(b"\r\n".join(lines))
        self.transport.close()

    def connection_lost(self, error: Exception | None) -> None:
        self._connections.discard(self)
        if self._inner is not None:
            self._inner.connection_lost(error)

    def pause_writing(self) -> None:
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        if self._inner is not None:
            self._inner.resume_writing()

    def shutdown(self) -> None:
        """uvicorn is ending."""
        self.transport.close()


def _head(data: bytes) -> tuple[bytes, Headers]:
    """The target and the headers of a head that uvicorn has parsed and put together again."""
    first, *lines = data.split(b"\r\n")
    pairs = [line.partition(b": ") for line in lines if line]
    return first.split(b" ")[1], [(name.lower(), value) for name, _, value in pairs]


def _protocol(socket: PicowsSocket, entry: Entry) -> Any:
    """A picows protocol that accepts the handshake it is fed."""
    extra = {"Sec-WebSocket-Protocol": entry.subprotocol} if entry.subprotocol else {}
    response = picows.WSUpgradeResponse.create_101_response(extra)
    accepted = picows.WSUpgradeResponseWithListener(response, socket)
    return WSProtocol(
        None, None, False, lambda request: accepted, _SILENT,
        True,  # disconnect on exception
        5.0,  # for the handshake
        True, PING_S, min(PONG_S, PING_S), picows.WSAutoPingStrategy.PING_WHEN_IDLE,
        False,  # pongs are ours: see `_ping`
        MAX_FRAME, None, READ_BUFFER,
    )  # fmt: skip
