"""The WebSocket `/v1/stream`: many generations over one socket, by ids the client chooses.

An ASGI application for one connection. One task reads, one writes; the engine's events go straight
into the outbox. A slow reader gets merged deltas, then close code 4408; the engine never waits. A
connection that ends cancels what it started. Knows messages, not what a model does with them.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import secrets
import time
from urllib.parse import urlsplit

from spec_serve.api import messages as m
from spec_serve.api.calls import Receive, Scope, Send
from spec_serve.api.generation import Generation, Outbox, failure
from spec_serve.api.service import MAX_GENERATIONS, Service
from spec_serve.api.version import __version__
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.websocket")

WRONG_FRAME, BAD_MESSAGE, SLOW, RESTART = 1003, 4400, 4408, 1012
MAX_UNREAD = 64  # answers waiting for a client that goes on talking
MAX_BAD = 100  # messages nobody understands, before the socket is closed


def origin_allowed(origin: str | None, host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a page from `origin` may connect; programs send no origin and may.

    Without this any web page could drive a server on its reader's machine. A page of the server's
    own counts only under an address or "localhost": behind another name may stand a foreign page
    whose name was made to point here (DNS rebinding); such names belong into `allowed`.
    """
    if origin is None or "*" in allowed or origin in allowed:
        return True
    if not host or urlsplit(origin).netloc.lower() != host.lower():
        return False
    name = urlsplit(f"//{host}").hostname or ""
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def header(scope: Scope, name: bytes) -> str | None:
    """The first header of this (lower-case) name."""
    for key, value in scope["headers"]:
        if key == name:
            return str(value.decode("latin-1"))
    return None


class Socket:
    """One connection. `sessions` is the server's set of open ones, for draining."""

    def __init__(self, service: Service, codec: m.Codec, send: Send) -> None:
        self._service, self._codec, self._send = service, codec, send
        self._wake = asyncio.Event()
        self._outbox = Outbox(self._wake.set)
        self._control: list[m.Server] = []
        self._running: dict[str, Generation | None] = {}  # None: still being prepared
        self._starting: set[asyncio.Task[None]] = set()
        self._flushed = asyncio.Event()
        self._close: int | None = None
        self._bad = 0

    @property
    def busy(self) -> bool:
        """Whether something runs or waits to be sent."""
        return bool(self._running or self._control or len(self._outbox))

    def say(self, message: m.Server) -> None:
        """Send a message that belongs to no generation."""
        self._control.append(message)
        self._wake.set()

    def close(self, code: int) -> None:
        """Close once what waits has been sent; at once for a reader that is too slow."""
        self._close = code
        self._wake.set()

    def cancel_all(self) -> None:
        """End every generation of this socket."""
        for gen in list(self._running):
            self._cancel(gen)

    async def serve(self, receive: Receive) -> None:
        """Until either side closes."""
        self.say(
            m.Hello(secrets.token_hex(8), __version__, MAX_GENERATIONS, list(self._service.models))
        )
        tasks = [
            asyncio.create_task(work)
            for work in (self._write(), self._read(receive), self._watch())
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            for task in self._starting:
                task.cancel()
            self.cancel_all()
            for error in ended:
                # A peer that is gone shows as an OSError of one kind or another.
                if isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)):
                    log.error("a WebSocket ended with an error", exc_info=error)

    async def _read(self, receive: Receive) -> None:
        while True:
            while len(self._control) > MAX_UNREAD:  # who does not read is not read from
                self._flushed.clear()
                await self._flushed.wait()
            event = await receive()
            if event["type"] == "websocket.disconnect":
                return
            frame = event.get("text") if self._codec.text else event.get("bytes")
            if frame is None:
                self.close(WRONG_FRAME)
                return await _forever()  # the writer closes
            try:
                message = self._codec.client_message(frame)
            except m.BadMessage as error:
                self._refuse(frame, error)
                continue
            if isinstance(message, m.Generate):
                self._generate(message)
            elif isinstance(message, m.Cancel):
                self._cancel(message.gen)
            elif isinstance(message, m.Ping):
                self.say(m.Pong(message.t, time.time()))

    def _refuse(self, frame: bytes | str, error: m.BadMessage) -> None:
        self._bad += 1
        gen = self._codec.peek_gen(frame)
        if gen in self._running:
            gen = None  # a second use of the id must not end the first
        self.say(m.Error("invalid_request", str(error), gen=gen, param=error.field or None))
        if self._bad >= MAX_BAD:
            self.close(BAD_MESSAGE)

    def _generate(self, wire: m.Generate) -> None:
        gen = wire.gen
        if gen in self._running:
            told = f"gen: {gen!r} is already running on this socket"
            self.say(m.Error("duplicate_id", told, param="gen"))
            return
        if len(self._running) >= MAX_GENERATIONS:
            told = f"at most {MAX_GENERATIONS} generations run at once on one socket"
            self.say(m.Error("overloaded", told, gen=gen, retryable=True))
            return
        self._running[gen] = None
        task = asyncio.create_task(self._begin(wire))
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    async def _begin(self, wire: m.Generate) -> None:
        gen = wire.gen
        try:
            prepared = await self._service.prepare(wire)
            if gen not in self._running:  # cancelled meanwhile
                return
            self._running[gen] = self._service.start(prepared, gen, self._outbox, self._over)
        except RequestError as error:
            if self._running.pop(gen, self) is not self:
                self._outbox.put(failure(error, gen, wire))
        except Exception:
            log.exception("a request could not be prepared")
            self._over(gen)
            lost = RequestError("", "the request could not be prepared", "engine_error")
            self._outbox.put(failure(lost, gen, wire))

    def _over(self, gen: str) -> None:
        self._running.pop(gen, None)
        self._wake.set()

    def _cancel(self, gen: str) -> None:
        if gen not in self._running:
            return
        generation = self._running[gen]
        if generation is not None:
            self._service.link.cancel(generation.id)
            return
        del self._running[gen]
        usage, timings = m.Usage(0, 0), m.Timings(0.0, 0.0, 0.0, 0.0)
        self._outbox.put(
            m.Finished(gen=gen, seq=0, reason="cancelled", usage=usage, timings=timings)
        )

    async def _write(self) -> None:
        send, encode, text = self._send, self._codec.encode, self._codec.text
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._control or len(self._outbox):
                control, self._control = self._control, []
                for message in (*control, *self._outbox.take()):
                    frame = encode(message)
                    if text:
                        await send({"type": "websocket.send", "text": frame.decode()})
                    else:
                        await send({"type": "websocket.send", "bytes": frame})
            self._flushed.set()
            if self._close is not None:
                await send({"type": "websocket.close", "code": self._close})
                return

    async def _watch(self) -> None:
        """Give up on a reader that does not keep up, even while a send is stuck."""
        while not self._outbox.overflowing:
            await asyncio.sleep(0.5)
        log.warning("a reader is too slow: its WebSocket is closed")
        self.cancel_all()
        with contextlib.suppress(TimeoutError):
            closing = {"type": "websocket.close", "code": SLOW}
            await asyncio.wait_for(self._send(closing), 1.0)


async def _forever() -> None:
    await asyncio.Event().wait()


async def _refuse(send: Send, status: int, said: str, *extra: tuple[bytes, bytes]) -> None:
    """Answer the handshake with an HTTP error instead of a WebSocket."""
    body = said.encode()
    headers = [
        (b"content-type", b"text/plain; charset=utf-8"),
        (b"content-length", str(len(body)).encode()),
        *extra,
    ]
    await send({"type": "websocket.http.response.start", "status": status, "headers": headers})
    await send({"type": "websocket.http.response.body", "body": body})


async def stream(
    service: Service, sessions: set[Socket], allow_origins: tuple[str, ...],
    scope: Scope, receive: Receive, send: Send,
) -> None:  # fmt: skip
    """The ASGI application of one WebSocket."""
    first = await receive()
    assert first["type"] == "websocket.connect", first["type"]
    offered = scope.get("subprotocols", [])
    name = next((one for one in offered if one in m.SUBPROTOCOLS), None if offered else m.JSON)
    allowed = origin_allowed(header(scope, b"origin"), header(scope, b"host") or "", allow_origins)
    if not allowed:
        return await _refuse(send, 403, "pages of this origin may not connect")
    if name is None:
        return await _refuse(send, 400, f"subprotocols: {', '.join(m.SUBPROTOCOLS)}")
    if not service.ready:
        return await _refuse(send, 503, "the server is not taking requests", (b"retry-after", b"5"))
    await send({"type": "websocket.accept", "subprotocol": name if offered else None})
    session = Socket(service, m.Codec(name), send)
    sessions.add(session)
    try:
        await session.serve(receive)
    finally:
        sessions.discard(session)
