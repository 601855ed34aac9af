"""The WebSocket `/v1/stream`: many generations over one socket, by ids the client chooses.

`Socket` is what both implementations share: frames become messages for a `Session`, whose answers
go out; keys that come as the first message, frames nobody understands, closing. `AsgiSocket` runs
it below any ASGI server, with a task that writes; picows_bridge.py writes at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging

from spec_serve.api import messages as m
from spec_serve.api.auth import Principal
from spec_serve.api.calls import Receive, Scope, Send
from spec_serve.api.session import MOVED, REVOKED, Session
from spec_serve.api.websocket_door import Door, Entry, Refusal
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.websocket")

OK, AWAY, UNNAMED = 1000, 1001, 1005
PROTOCOL, WRONG_FRAME, BAD_TEXT, POLICY, TOO_BIG, INTERNAL = 1002, 1003, 1007, 1008, 1009, 1011
RESTART = 1012
UNAUTHORIZED, BAD_MESSAGE, SLOW = 3000, 4400, 4408
MAX_BAD = 100  # messages nobody understands, before the socket is closed
AUTH_S = 5.0  # for a key that comes as the first message

_CODECS = {name: m.Codec(name) for name in m.SUBPROTOCOLS}


class Socket:
    """One connection, whoever carries its frames."""

    def __init__(self, door: Door, entry: Entry) -> None:
        self.codec = _CODECS[entry.codec]
        self.session: Session | None = None
        self.closing: int | None = None  # the code of the close frame that is to be sent
        self._door, self._entry = door, entry
        self._early: list[m.Server] = []  # said before there is a session
        self._late: asyncio.TimerHandle | None = None
        self._bad = 0

    # -- what an implementation brings

    def wake(self) -> None:
        """There is something to send, or `closing` was set."""
        raise NotImplementedError

    # -- what it calls

    def open(self) -> None:
        """The handshake is done."""
        self._door.sockets.add(self)
        if self._entry.principal is not None:
            self.begin(self._entry.principal)
        else:
            self._late = asyncio.get_running_loop().call_later(AUTH_S, self._unauthorized, None)

    def lost(self, code: int | None) -> None:
        """The connection is gone. code: of the client's close frame, None if there was none."""
        self._door.sockets.discard(self)
        self._in_time()
        if self.session is not None:
            dropped = code not in (OK, AWAY, UNNAMED) and self.closing in (None, MOVED)
            self.session.drop(resumable=dropped)

    def frame(self, payload: bytes | str) -> None:
        """A whole message has come, of the kind of frame that the codec has."""
        if self.closing is not None:
            return
        try:
            message = self.codec.client_message(payload)
        except m.BadMessage as error:
            self._refuse(payload, error)
            return
        if self.session is None:
            self._authenticate(message)
        else:
            self.session.receive(message)

    def take(self) -> list[m.Server]:
        """What is to be sent now, in order."""
        if self._early:
            early, self._early = self._early, []
            return early
        return [] if self.session is None else self.session.take()

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._early) or (self.session is not None and self.session.waiting)

    # -- what the server calls

    @property
    def busy(self) -> bool:
        """Whether something runs or waits to be sent."""
        return bool(self._early) or (self.session is not None and self.session.busy)

    def say(self, message: m.Server) -> None:
        """Send a message that belongs to no generation."""
        if self.session is not None:
            self.session.say(message)

    def cancel_all(self) -> None:
        """End every generation of this socket."""
        if self.session is not None:
            self.session.cancel_all()

    @property
    def principal(self) -> Principal | None:
        """Whose it is; None before a key has come."""
        return None if self.session is None else self.session.principal

    def revoke(self) -> None:
        """Its key is in force no longer."""
        self.cancel_all()
        self.say(REVOKED)
        self.close(UNAUTHORIZED)

    def close(self, code: int) -> None:
        """Close once what waits has been sent."""
        if self.closing is None:
            self.closing = code
            self.wake()

    # --

    def begin(self, principal: Principal) -> None:
        """The client may use the server."""
        service, trace = self._door.service, self._entry.trace
        self.session = Session(service, principal, self.wake, self.close, trace)
        self.session.greet()

    def _in_time(self) -> None:
        if self._late is not None:
            self._late.cancel()
            self._late = None

    def _authenticate(self, message: m.Client) -> None:
        self._in_time()
        if not isinstance(message, m.Auth):
            return self._unauthorized("the first message has to be `auth` with an API key")
        try:
            principal = self._door.keys.check(message.api_key)
        except RequestError as error:
            return self._unauthorized(str(error))
        self.begin(principal)

    def _unauthorized(self, told: str | None) -> None:
        self._early.append(m.Error("unauthorized", told or "no API key came in time"))
        self.close(UNAUTHORIZED)

    def _refuse(self, payload: bytes | str, error: m.BadMessage) -> None:
        if self.session is None:
            return self._unauthorized("the first message has to be `auth` with an API key")
        self._bad += 1
        self.session.refuse(error, self.codec.peek_gen(payload))
        if self._bad >= MAX_BAD:
            self.close(BAD_MESSAGE)


class AsgiSocket(Socket):
    """A socket below an ASGI server: one task reads, one writes."""

    def __init__(self, door: Door, entry: Entry, send: Send) -> None:
        super().__init__(door, entry)
        self._send = send
        self._awake = asyncio.Event()
        self._flushed = asyncio.Event()
        self._code: int | None = None  # of the client's close frame

    def wake(self) -> None:
        self._awake.set()

    async def serve(self, receive: Receive) -> None:
        """Until either side closes."""
        self.open()
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
            self.lost(self._code)
            for error in ended:
                # A peer that is gone shows as an OSError of one kind or another.
                if isinstance(error, Exception) and not isinstance(error, (OSError, EOFError)):
                    log.error("a WebSocket ended with an error", exc_info=error)

    async def _read(self, receive: Receive) -> None:
        while True:
            while self.session is not None and self.session.full:
                self._flushed.clear()
                await self._flushed.wait()
            event = await receive()
            if event["type"] == "websocket.disconnect":
                # Without a reason there was no close frame: uvicorn says 1005 to both.
                self._code = event.get("code") if "reason" in event else None
                return
            payload = event.get("text") if self.codec.text else event.get("bytes")
            if payload is None:
                self.close(WRONG_FRAME)
                await asyncio.Event().wait()  # the writer closes
            else:
                self.frame(payload)

    async def _write(self) -> None:
        send, encode, text = self._send, self.codec.encode, self.codec.text
        while True:
            await self._awake.wait()
            self._awake.clear()
            while self.waiting:
                for message in self.take():
                    frame = encode(message)
                    if text:
                        await send({"type": "websocket.send", "text": frame.decode()})
                    else:
                        await send({"type": "websocket.send", "bytes": frame})
            self._flushed.set()
            if self.closing is not None:
                await send({"type": "websocket.close", "code": self.closing})
                return

    async def _watch(self) -> None:
        """Give up on a reader that does not keep up, even while a send is stuck."""
        while self.session is None or not self.session.overflowing:
            await asyncio.sleep(0.5)
        log.warning("a reader is too slow: its WebSocket is closed")
        self.closing = SLOW
        self.cancel_all()
        with contextlib.suppress(TimeoutError):
            closing = {"type": "websocket.close", "code": SLOW}
            await asyncio.wait_for(self._send(closing), 1.0)


async def stream(door: Door, scope: Scope, receive: Receive, send: Send) -> None:
    """The ASGI application of one WebSocket."""
    first = await receive()
    assert first["type"] == "websocket.connect", first["type"]
    entry = door.enter(scope["headers"])
    if isinstance(entry, Refusal):
        body = entry.said.encode()
        headers = [
            (b"content-type", b"text/plain; charset=utf-8"),
            (b"content-length", str(len(body)).encode()),
            *entry.headers,
        ]
        start = {"type": "websocket.http.response.start", "status": entry.status}
        await send({**start, "headers": headers})
        await send({"type": "websocket.http.response.body", "body": body})
        return
    await send({"type": "websocket.accept", "subprotocol": entry.subprotocol})
    await AsgiSocket(door, entry, send).serve(receive)
