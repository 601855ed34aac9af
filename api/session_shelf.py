"""What a dropped connection leaves behind, so that another one can take it over.

A `Track` keeps the numbered messages of one resumable generation from the last acknowledged on. The
`Shelf` knows every session by its resume token and forgets a dropped one after the window. Knows no
transports; what running on without a client means is the session's business.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from spec_serve.api.auth import Principal
from spec_serve.api.generation import Numbered, weigh

MAX_KEPT = 1 << 20  # bytes of messages kept for one generation, roughly
MAX_KEPT_ALL = 256 << 20  # and for all of them together
WINDOW_S = 60.0


class Track:
    """One resumable generation: `kept` messages end with number `next` - 1, without gaps.

    sent: one behind the last message that was ever handed to a transport. over: its last message
    is among them.
    """

    __slots__ = ("_bytes", "_shelf", "gen", "kept", "next", "over", "sent")

    def __init__(self, gen: str, shelf: Shelf[Any]) -> None:
        self.gen = gen
        self.kept: deque[tuple[Numbered, int]] = deque()
        self.next = self.sent = 0
        self.over = False
        self._bytes = 0
        self._shelf = shelf

    @property
    def first(self) -> int:
        """The number of the oldest message kept."""
        return self.next - len(self.kept)

    @property
    def lost(self) -> bool:
        """Whether a message went that no client can have seen: nobody can go on from here."""
        return self.first > self.sent

    def keep(self, message: Numbered) -> None:
        """Keep a message that has its number; the oldest go when there are too many."""
        weight = weigh(message)
        self.kept.append((message, weight))
        self.next += 1
        self._bytes += weight
        shelf = self._shelf
        shelf.bytes += weight
        while self._bytes > MAX_KEPT or (shelf.bytes > MAX_KEPT_ALL and self.kept):
            self._forget()

    def ack(self, seq: int) -> None:
        """Messages up to seq have arrived."""
        while self.kept and self.first <= seq:
            self._forget()

    def since(self, seq: int) -> list[Numbered] | None:
        """The messages behind seq; None where some are gone, or never were."""
        if not self.first - 1 <= seq < self.next:
            return None
        self.ack(seq)
        return [message for message, _ in self.kept]

    def clear(self) -> None:
        """Keep nothing any more."""
        while self.kept:
            self._forget()

    def _forget(self) -> None:
        _, weight = self.kept.popleft()
        self._bytes -= weight
        self._shelf.bytes -= weight


class Held(Protocol):
    """A session, as the shelf knows it."""

    principal: Principal
    resume_token: str

    def expire(self) -> None:
        """The window is over: end what still runs."""
        ...


S = TypeVar("S", bound=Held)


class Shelf(Generic[S]):
    """Sessions by their token, with and without a connection. window_s 0: nothing is kept.

    `bytes`: of all messages kept. Belongs to one loop.
    """

    def __init__(self, window_s: float = WINDOW_S) -> None:
        self.window_s = window_s
        self.bytes = 0
        self._sessions: dict[str, S] = {}
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def __len__(self) -> int:
        return len(self._sessions)

    @property
    def dropped(self) -> int:
        """How many sessions wait without a connection."""
        return len(self._timers)

    def token(self) -> str:
        """A new resume token, of 128 bits."""
        return secrets.token_urlsafe(16)

    def add(self, session: S) -> None:
        """From now on the session can be found."""
        self._sessions[session.resume_token] = session

    def find(self, token: str, principal: Principal) -> S | None:
        """The session of this token, if it is the same principal's."""
        found = self._sessions.get(token)
        return found if found is not None and found.principal == principal else None

    def hold(self, session: S) -> None:
        """The session's connection is gone: it has window_s from now on."""
        token = session.resume_token
        loop = asyncio.get_running_loop()
        self._timers[token] = loop.call_later(self.window_s, self._expire, token)

    def remove(self, session: S) -> None:
        """Nothing of the session is left to be taken over."""
        token = session.resume_token
        self._sessions.pop(token, None)
        timer = self._timers.pop(token, None)
        if timer is not None:
            timer.cancel()

    def revoke(self, knows: Callable[[Principal], bool]) -> None:
        """End what waits without a connection for those who are known no longer."""
        for token in list(self._timers):
            if not knows(self._sessions[token].principal):
                self._expire(token)

    def close(self) -> None:
        """Forget all sessions without a word."""
        for timer in self._timers.values():
            timer.cancel()
        self._timers.clear()
        self._sessions.clear()

    def _expire(self, token: str) -> None:
        session = self._sessions.get(token)
        if session is not None:
            self.remove(session)
            session.expire()
