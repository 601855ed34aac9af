"""One generation as the client of a WebSocket sees it: what came, what is acknowledged, what waits.

Holds the promise that nothing is lost or seen twice, across a resume too. Knows no socket.
"""

from __future__ import annotations

import asyncio
from time import monotonic

from spec_serve.api import messages as m
from spec_serve.client.answers import GenerationEvent, ServerError

ACK_MESSAGES = 32
ACK_S = 0.5


class Stream:
    """A generation that was asked for. seen: the last seq that came, -1 before the first.

    left: its reader has gone, and it only waits for its end. homes: resume tokens of the server's
    sessions that may hold it, newest last; more than one while it is unknown whether a resume
    arrived. asked: the one that was asked last.
    """

    def __init__(self, request: m.Generate) -> None:
        self.request = request
        self.seen = -1
        self.left = False
        self.homes: list[str] = []
        self.asked = ""
        self._acked, self._acked_at = -1, monotonic()
        self._queue: asyncio.Queue[GenerationEvent | Exception] = asyncio.Queue()

    def take(self, message: GenerationEvent | m.Error) -> bool:
        """A message from the server; whether it was the last one."""
        if isinstance(message, m.Error):
            self.fail(ServerError(message))
            return True
        if message.seq <= self.seen:
            return False  # sent again after a resume, and seen before
        if message.seq != self.seen + 1:
            told = f"message {self.seen + 1} of {message.gen!r} is missing"
            self.fail(ServerError(m.Error("resume_gap", told, gen=message.gen)))
            return True
        self.seen = message.seq
        self._queue.put_nowait(message)
        return isinstance(message, m.Finished) and message.last

    def fail(self, error: Exception) -> None:
        """Nothing more will come."""
        self._queue.put_nowait(error)

    def ack(self, at_once: bool) -> m.Ack | None:
        """What to acknowledge now, if it is time or to be at once."""
        now, count = monotonic(), self.seen - self._acked
        if not at_once and count < ACK_MESSAGES and now - self._acked_at < ACK_S:
            return None
        self._acked, self._acked_at = self.seen, now
        return m.Ack(self.request.gen, self.seen)

    async def next(self, silence_s: float | None) -> GenerationEvent:
        """The next event. Raises ServerError, ConnectionLost, TimeoutError after silence."""
        try:
            if silence_s is None:
                found = await self._queue.get()
            else:
                found = await asyncio.wait_for(self._queue.get(), silence_s)
        except TimeoutError:
            raise TimeoutError(f"nothing came for {silence_s:g} s") from None
        if isinstance(found, Exception):
            raise found
        return found
