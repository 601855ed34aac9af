"""The least of a gRPC client: one server-streaming call on a socket, each message as it arrives.

Just enough of HTTP/2 (RFC 9113) and HPACK (RFC 7541, literals only) to time bytes on a socket
without a client library's own cost. Windows are opened as wide as they go; not for use against
anything but a server that is being measured.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator

DATA, HEADERS, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0, 1, 4, 6, 7, 8
ACK = END_STREAM = 1
END_HEADERS = 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
INITIAL_WINDOW, WIDE = 4, 2**31 - 1


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _literal(text: str) -> bytes:
    data = text.encode()
    assert len(data) < 127, "longer strings need a longer prefix"
    return bytes([len(data)]) + data


def _head(address: str, path: str) -> bytes:
    fields = {
        ":method": "POST", ":scheme": "http", ":path": path, ":authority": address,
        "te": "trailers", "content-type": "application/grpc",
    }  # fmt: skip
    return b"".join(b"\0" + _literal(name) + _literal(value) for name, value in fields.items())


def opening(address: str, path: str, request: bytes) -> bytes:
    """All that a client says: the preface, wide windows, the call's head and its one message."""
    message = b"\0" + struct.pack(">I", len(request)) + request
    return (
        PREFACE
        + _frame(SETTINGS, 0, 0, struct.pack(">HI", INITIAL_WINDOW, WIDE))
        + _frame(WINDOW_UPDATE, 0, 0, struct.pack(">I", WIDE - 65_535))
        + _frame(HEADERS, END_HEADERS, 1, _head(address, path))
        + _frame(DATA, END_STREAM, 1, message)
    )


class Call:
    """A call at `address` (host:port) with one request; close it to cancel."""

    def __init__(self, address: str, path: str, request: bytes) -> None:
        host, _, port = address.rpartition(":")
        self._socket = socket.create_connection((host.strip("[]"), int(port)), 10.0)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._socket.sendall(opening(address, path, request))

    def close(self) -> None:
        """Hang up."""
        self._socket.close()

    def messages(self) -> Iterator[bytes]:
        """Each as soon as it is whole, until the call ends. Raises OSError if it breaks."""
        held, body = bytearray(), bytearray()
        while True:
            data = self._socket.recv(1 << 16)
            if not data:
                raise ConnectionResetError("the server hung up")
            held += data
            while len(held) >= 9:
                length = int.from_bytes(held[:3], "big")
                if len(held) < 9 + length:
                    break
                kind, flags, payload = held[3], held[4], bytes(held[9 : 9 + length])
                del held[: 9 + length]
                if kind == DATA:
                    body += payload
                    while len(body) >= 5 and len(body) >= 5 + (size := _size(body)):
                        yield bytes(body[5 : 5 + size])
                        del body[: 5 + size]
                elif kind == HEADERS and flags & END_STREAM:
                    return
                elif kind in (SETTINGS, PING) and not flags & ACK:
                    answer = payload if kind == PING else b""
                    self._socket.sendall(_frame(kind, ACK, 0, answer))
                elif kind == GOAWAY:
                    raise ConnectionResetError("the server goes away")


def _size(body: bytearray) -> int:
    return int.from_bytes(body[1:5], "big")
