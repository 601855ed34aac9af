"""A socketpair between two processes: whole messages in, whole messages out.

A frame is its length (four bytes, little endian) and the message. `Channel` blocks, for the
engine's side and for a server that waits for it to load; `LoopChannel` never does. Knows nothing of
what the messages mean.
"""

from __future__ import annotations

import asyncio
import logging
import select
import socket
import threading
from collections import deque
from collections.abc import Callable

log = logging.getLogger("spec_serve.channel")

LARGEST = 1 << 28  # bytes of a frame: far more than any prompt has
READ = 1 << 16


def framed(payload: bytes) -> bytes:
    """A message as it goes over the socket."""
    return len(payload).to_bytes(4, "little") + payload


def _size(data: bytes | bytearray | memoryview, at: int = 0) -> int:
    size = int.from_bytes(data[at : at + 4], "little")
    if size > LARGEST:
        raise ValueError(f"a frame of {size} bytes")
    return size


class Frames:
    """Cuts what arrives into messages again."""

    def __init__(self) -> None:
        self._held = bytearray()

    def feed(self, data: bytes | memoryview) -> list[bytes]:
        """The messages that `data` completes. ValueError for a length that can't be."""
        held = self._held
        if held:
            held += data
            if len(held) < 4 or len(held) < 4 + _size(held):
                return []
            data = bytes(held)
            held.clear()
        found: list[bytes] = []
        at, have = 0, len(data)
        while have - at >= 4:
            end = at + 4 + _size(data, at)
            if end > have:
                break
            found.append(bytes(data[at + 4 : end]))
            at = end
        if at < have:
            held += data[at:]
        return found


class Channel:
    """One end, blocking. `send` may be called in any thread, `receive` in one."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(True)
        self.sock = sock
        self.frames = Frames()
        self.ready: deque[bytes] = deque()  # received and not yet asked for
        self._lock = threading.Lock()
        self._poll = select.poll()  # unlike select, good for descriptors beyond 1023
        self._poll.register(sock, select.POLLIN)

    def send(self, payload: bytes) -> None:
        """Raises OSError when the other side is gone."""
        with self._lock:
            self.sock.sendall(framed(payload))

    def receive(self, within_s: float | None = None) -> bytes | None:
        """The next message; None at the end. TimeoutError if nothing arrives in time."""
        while not self.ready:
            if within_s is not None and not self._poll.poll(within_s * 1e3):
                raise TimeoutError
            try:
                data = self.sock.recv(READ)
            except ConnectionError:
                data = b""
            if not data:
                return None
            self.ready += self.frames.feed(data)
        return self.ready.popleft()


class LoopChannel:
    """One end in an event loop, taken over from a Channel; all methods belong to the loop's thread.

    took: called with each message. lost: called once, when the other side is gone.
    """

    def __init__(
        self,
        channel: Channel,
        loop: asyncio.AbstractEventLoop,
        took: Callable[[bytes], None],
        lost: Callable[[], None],
    ) -> None:
        self._sock, self._frames, self._loop = channel.sock, channel.frames, loop
        self._took, self._lost = took, lost
        self._unsent = bytearray()
        self._open = True
        self._read = bytearray(READ)
        self._view = memoryview(self._read)
        self._sock.setblocking(False)
        for payload in channel.ready:
            loop.call_soon(took, payload)
        loop.add_reader(self._sock.fileno(), self._readable)

    def post(self, payload: bytes) -> None:
        """Send, now or when the other side has room. What comes after its end is dropped."""
        if not self._open:
            return
        data = framed(payload)
        if not self._unsent:
            sent = self._send(data)
            if sent == len(data):
                return
            self._unsent += data[sent:]
            self._loop.add_writer(self._sock.fileno(), self._writable)
        else:
            self._unsent += data

    def close(self) -> None:
        """Close the socket; `lost` is not called any more."""
        if not self._open:
            return
        self._open = False
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())
        self._unsent.clear()
        self._sock.close()

    def _send(self, data: bytes | bytearray) -> int:
        try:
            return self._sock.send(data)
        except BlockingIOError:
            return 0
        except OSError:  # the reader is about to see the end
            return len(data)

    def _writable(self) -> None:
        del self._unsent[: self._send(self._unsent)]
        if not self._unsent:
            self._loop.remove_writer(self._sock.fileno())

    def _readable(self) -> None:
        try:
            count = self._sock.recv_into(self._read)
        except BlockingIOError:
            return
        except OSError:
            count = 0
        if not count:
            self.close()
            self._lost()
            return
        try:
            for payload in self._frames.feed(self._view[:count]):
                self._took(payload)
        except Exception:
            log.exception("what came through the channel makes no sense")
            self.close()
            self._lost()
