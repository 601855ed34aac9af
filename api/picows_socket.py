"""A WebSocket whose messages are written in the callback that brings them, on picows.

No task and no queue: frames call into the session, a step's messages become frames at once and
are written together when the step has been handed out. A reader that is slow gets merged messages,
one that sends more than it reads is not read from. Knows frames, not what messages mean.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from typing import Any

import picows

from spec_serve.api import messages as m
from spec_serve.api import websocket as ws
from spec_serve.api.auth import Principal
from spec_serve.api.generation import MAX_STUCK_S
from spec_serve.api.websocket_door import Door, Entry
from spec_serve.spec.request import Event

log = logging.getLogger("spec_serve.websocket")

MAX_FRAME = 8 << 20
MAX_FRAGMENTS = 4096  # of one message
CLOSE_S = 2.0  # for the client's close frame after ours
BURST = 256  # messages of one client, after which others have their turn
HEAD = 14  # bytes picows wants free before a message, for the frame's head

_TEXT, _BINARY = picows.WSMsgType.TEXT, picows.WSMsgType.BINARY
_CONTINUATION, _PING, _CLOSE = (
    picows.WSMsgType.CONTINUATION, picows.WSMsgType.PING, picows.WSMsgType.CLOSE
)  # fmt: skip
_buffer = bytearray(HEAD)  # all sockets belong to one loop: a frame is made, sent and forgotten


class Burst:
    """What a step gave to sockets, written in one go when all of it has been handed out.

    That costs a third less than writing between the work for one and for the next: readers are
    woken once. ready: a message, or None for what waits in the socket; who puts the first one there
    calls `begin`.
    """

    __slots__ = ("ready",)

    def __init__(self) -> None:
        self.ready: list[tuple[Pipe, m.Server | None]] = []

    def begin(self) -> None:
        """At the latest when this callback of the loop is over, all is sent."""
        asyncio.get_running_loop().call_soon(self.flush)

    def flush(self, events: Sequence[Event] = ()) -> None:
        """Write; the link's observer, so that it comes before what is counted of a step."""
        if not self.ready:
            return
        buffer, head = _buffer, HEAD
        ready = self.ready.copy()
        self.ready.clear()
        for pipe, message in ready:
            try:
                if message is not None:
                    encode_into = pipe.encode_into
                    encode_into(message, buffer, head)
                    # Nothing, once a close frame is out.
                    pipe.wire.send_reuse_external_bytearray(pipe.kind, buffer, head)
                else:
                    pipe.soon = False
                    pipe.socket.flush_more()
            except Exception:
                log.exception("a WebSocket could not be written to")
                pipe.socket.transport.abort()


class Pipe:
    """The few things of a socket that a message touches on its way out.

    Apart from the socket, because what is not in the processor's cache costs more than the work:
    with many sockets that is every object of each. soon: what waits in the socket is about to be
    sent.
    """

    __slots__ = ("_burst", "_ready", "encode_into", "kind", "socket", "soon", "wire")

    def __init__(self, socket: PicowsSocket, wire: picows.WSTransport, burst: Burst) -> None:
        self.socket, self.kind, self.wire = socket, socket.kind, wire
        self.soon = False
        self.encode_into = socket.codec.encode_into
        self._burst, self._ready = burst, burst.ready

    def push(self, message: m.Server) -> None:
        """Send this message with the others of its step."""
        ready = self._ready
        if not ready:
            self._burst.begin()
        ready.append((self, message))

    def wake(self) -> None:
        """The socket has more to send."""
        if not self.soon:
            self.soon = True
            if not self._ready:
                self._burst.begin()
            self._ready.append((self, None))


class PicowsSocket(ws.Socket, picows.WSListener):
    """A socket whose messages are written in the callback that brings them."""

    def __init__(
        self, door: Door, entry: Entry, transport: asyncio.Transport, connections: set[Any],
        burst: Burst,
    ) -> None:  # fmt: skip
        super().__init__(door, entry)
        self.loop = asyncio.get_running_loop()
        self.transport = transport  # uvicorn's and the server's way to a connection
        self._connections, self._burst = connections, burst
        self._wire: picows.WSTransport | None = None
        self._pipe: Pipe | None = None
        self.kind = _TEXT if self.codec.text else _BINARY
        self._paused = False  # writing: what comes is merged in the outbox
        self._deaf = False  # reading: the client has to read first
        self._held: deque[bytes | str] = deque()  # came while we were deaf
        self._heard = 0  # messages in this go
        self._ponged: bytes | None = None  # waits until writing goes on
        self._parts: list[bytes] | None = None  # of a message in fragments
        self._size = 0
        self._code: int | None = None  # of the client's close frame
        self._shut = False  # our close frame is out
        self._timer: asyncio.TimerHandle | None = None

    # -- writing

    def wake(self) -> None:
        if self._paused:
            session = self.session
            if session is not None and session.overflowing:
                self._too_slow()
            return
        if self._pipe is not None:
            self._pipe.wake()

    def flush_more(self) -> None:
        """Send what waits in the session, unless the client does not keep up."""
        wire = self._wire
        if wire is None or self._shut:
            return
        while not self._paused and self.waiting:
            taken = self.take()
            if len(taken) == 1:
                self.codec.encode_into(taken[0], _buffer, HEAD)
                wire.send_reuse_external_bytearray(self.kind, _buffer, HEAD)
            elif taken:
                self._send_many(taken)
        if self._paused:
            return
        if self._deaf:
            self.loop.call_soon(self._listen)
        if self.closing is not None:
            self._finish(self.closing)

    def _send_many(self, messages: list[m.Server]) -> None:
        encode, first = self.codec.encode, bytes([0x80 | self.kind.value])
        parts: list[bytes] = []
        for message in messages:
            frame = encode(message)
            size = len(frame)
            if size < 126:
                parts += (first, bytes([size]), frame)
            elif size < 1 << 16:
                parts += (first, b"\x7e", size.to_bytes(2, "big"), frame)
            else:
                parts += (first, b"\x7f", size.to_bytes(8, "big"), frame)
        self.transport.write(b"".join(parts))

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        self._paused = True
        self._tune()
        if self._timer is None:
            self._timer = self.loop.call_later(MAX_STUCK_S, self._too_slow)

    def resume_writing(self) -> None:
        """It has caught up."""
        self._paused = False
        if self._timer is not None and not self._shut:
            self._timer.cancel()
            self._timer = None
        if self._ponged is not None and self._wire is not None and not self._shut:
            self._wire.send_pong(self._ponged)
            self._ponged = None
        self._tune()
        if self._pipe is not None:
            self._pipe.wake()

    def _tune(self) -> None:
        if self.session is not None and self._pipe is not None:
            self.session.direct(None if self._paused else self._pipe)

    def _too_slow(self) -> None:
        if self.closing != ws.SLOW and not self._shut:
            log.warning("a reader is too slow: its WebSocket is closed")
            self.closing = ws.SLOW
            self.cancel_all()
            self._finish(ws.SLOW)

    def _finish(self, code: int) -> None:
        """Send the close frame; the client has CLOSE_S for its own."""
        if self._shut or self._wire is None:
            return
        self._wire.send_close(code)  # type: ignore[arg-type]
        self._shut = True
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self.loop.call_later(CLOSE_S, self._wire.disconnect, False)
        if self._deaf:  # its close frame is all that is still read
            self._deaf = False
            self.transport.resume_reading()

    def shutdown(self) -> None:
        """uvicorn is ending."""
        self.close(ws.RESTART)

    # -- reading

    def begin(self, principal: Principal) -> None:
        super().begin(principal)
        self._tune()

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self._wire = transport
        self._pipe = Pipe(self, transport, self._burst)
        self._connections.add(self)
        self.open()

    def on_ws_disconnected(self, transport: picows.WSTransport) -> None:
        self._connections.discard(self)
        self._shut = True
        self._held.clear()
        if self._timer is not None:
            self._timer.cancel()
        try:
            self.lost(self._code)
        except Exception:
            log.exception("a WebSocket could not be ended")

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        try:
            self._on_frame(frame)
        except Exception:
            log.exception("a WebSocket's frame could not be handled")
            self.closing = ws.INTERNAL
            self._finish(ws.INTERNAL)

    def _on_frame(self, frame: picows.WSFrame) -> None:
        kind = frame.msg_type
        if kind == _CLOSE:
            self._closed(frame.get_payload_as_bytes())
        elif self.closing is not None:
            pass
        elif frame.rsv1 or frame.rsv2 or frame.rsv3:
            self.close(ws.PROTOCOL)
        elif kind == _PING:
            self._ping(frame.get_payload_as_bytes())
        elif kind == _CONTINUATION or (self._parts is None and kind in (_TEXT, _BINARY)):
            self._data(frame)
        elif kind in (_TEXT, _BINARY):  # a new message before the last one's end
            self.close(ws.PROTOCOL)
        if frame.last_in_buffer:
            self._heard = 0

    def _closed(self, payload: bytes) -> None:
        """The client's close frame: answered if it was the first."""
        wire = self._wire
        assert wire is not None
        if not self._shut:
            self._code = int.from_bytes(payload[:2], "big") if payload else ws.UNNAMED
            wire.send_close(self._code if payload else ws.OK)  # type: ignore[arg-type]
            self._shut = True
        wire.disconnect()
        if self._timer is not None:
            self._timer.cancel()
        # Graceful, but not for ever: what waits may never be read.
        self._timer = self.loop.call_later(CLOSE_S, wire.disconnect, False)

    def _ping(self, payload: bytes) -> None:
        """A pong, or the newest one later: who does not read must not make us hold many."""
        if self._paused:
            self._ponged = payload
        elif self._wire is not None:
            self._wire.send_pong(payload)

    def _data(self, frame: picows.WSFrame) -> None:
        parts = self._parts
        if frame.msg_type == _CONTINUATION:
            if parts is None:
                return self.close(ws.PROTOCOL)
        elif frame.msg_type != self.kind:
            return self.close(ws.WRONG_FRAME)
        elif frame.fin:
            return self._message(frame.get_payload_as_bytes())
        else:
            parts = self._parts = []
            self._size = 0
        self._size += frame.payload_size
        parts.append(frame.get_payload_as_bytes())
        if self._size > MAX_FRAME:
            self.close(ws.TOO_BIG)
        elif len(parts) > MAX_FRAGMENTS:
            self.close(ws.POLICY)
        elif frame.fin:
            self._parts = None
            self._message(b"".join(parts))

    def _message(self, payload: bytes | str) -> None:
        if self.codec.text:
            assert isinstance(payload, bytes)
            try:
                payload = payload.decode()
            except UnicodeDecodeError:
                return self.close(ws.BAD_TEXT)
        if self._deaf:
            self._held.append(payload)
            return
        self.frame(payload)
        self._heard += 1
        full = self.session is not None and self.session.full
        if full or self._heard >= BURST:
            self._deaf = True
            self.transport.pause_reading()
            if not full:
                self.loop.call_soon(self._listen)

    def _listen(self) -> None:
        """Go on with what came while we were deaf, then read again."""
        for _ in range(BURST):
            if self._shut or (self.session is not None and self.session.full):
                return
            if not self._held:
                break
            self.frame(self._held.popleft())
        if self._held:
            self.loop.call_soon(self._listen)
        elif self._deaf:
            self._deaf = False
            self._heard = 0
            self.transport.resume_reading()
