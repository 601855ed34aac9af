"""What carries a client's messages: a WebSocket, or a gRPC session (rpc_session.py).

A wire is one connection from its handshake to its end; coming back is the client's business.
Imports no gRPC.
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Any, Protocol

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidStatus
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from spec_serve.client.answers import ConnectionLost, ServerError

_REFUSALS: dict[int, m.Code] = {
    401: "unauthorized", 403: "forbidden", 429: "rate_limited", 503: "overloaded",
}  # fmt: skip


class Wire(Protocol):
    """One connection. Both directions raise ConnectionLost, with a WebSocket's code, at its end."""

    async def send(self, message: m.Client) -> None:
        """Say something."""
        ...

    async def receive(self) -> m.Server:
        """What is said next. Raises BadMessage too."""
        ...

    async def close(self, code: int = 1000) -> None:
        """End it in good order."""
        ...

    def abort(self) -> None:
        """Drop it without a word."""
        ...


class SocketWire:
    """A WebSocket."""

    def __init__(self, socket: ClientConnection, codec: m.Codec) -> None:
        self.socket = socket
        self._codec = codec

    async def send(self, message: m.Client) -> None:
        """Say something."""
        frame = self._codec.encode(message)
        try:
            await self.socket.send(frame.decode() if self._codec.text else frame)
        except ConnectionClosed as closed:
            raise ConnectionLost(closed.rcvd.code if closed.rcvd else None) from None

    async def receive(self) -> m.Server:
        """What is said next."""
        try:
            frame = await self.socket.recv()
        except ConnectionClosed as closed:
            raise ConnectionLost(closed.rcvd.code if closed.rcvd else 1006) from None
        return self._codec.server_message(frame)

    async def close(self, code: int = 1000) -> None:
        """With a close frame."""
        await self.socket.close(code)

    def abort(self) -> None:
        """Without one."""
        self.socket.transport.abort()


async def open_socket(
    url: str,
    codec: m.Codec,
    origin: str | None,
    api_key: str | None,
    tls: ssl.SSLContext | None,
    connect_s: float,
) -> SocketWire:
    """Connect. Raises ServerError if refused, OSError, TimeoutError."""
    secure: dict[str, Any] = {"ssl": tls} if tls is not None else {}
    try:
        socket = await connect(
            url,
            subprotocols=[Subprotocol(codec.name)],
            origin=origin,  # type: ignore[arg-type]
            additional_headers={"authorization": f"Bearer {api_key}"} if api_key else {},
            compression=None,
            max_size=None,
            open_timeout=connect_s,
            proxy=None,
            **secure,
        )
    except InvalidStatus as refused:
        raise _refusal(refused) from None
    except InvalidHandshake as error:
        raise ConnectionLost(None, f"{url}: {error}") from None
    return SocketWire(socket, codec)


async def greeting(wire: Wire, within_s: float) -> m.Hello:
    """The server's first word. Raises ServerError, ConnectionLost, TimeoutError."""
    async with asyncio.timeout(within_s):
        first = await wire.receive()
    if isinstance(first, m.Hello):
        return first
    if isinstance(first, m.Error):
        raise ServerError(first)
    raise ConnectionLost(None, "the server did not say hello")


def _refusal(refused: InvalidStatus) -> ServerError:
    answer = refused.response
    code = _REFUSALS.get(answer.status_code, "invalid_request")
    body = (answer.body or b"").decode(errors="replace").strip()
    after = answer.headers.get("retry-after", "")
    wait_ms = int(after) * 1000 if after.isdigit() else 1000
    retryable = answer.status_code in (429, 503)
    said = f"the connection was refused ({answer.status_code}): {body[:500]}"
    return ServerError(
        m.Error(code, said, retryable=retryable, retry_after_ms=wait_ms if retryable else 0)
    )
