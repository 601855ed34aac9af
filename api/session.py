"""One client's generations, apart from any socket: its messages come in, numbered answers go out.

Used by both WebSocket implementations and by gRPC's Session. What the client said is given to
`receive`; `wake` is called when `take` has something, often in the middle of a step. A dropped
session lets its resumable generations go on until another one resumes them.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING

from spec_serve.api import messages as m
from spec_serve.api import traces
from spec_serve.api.auth import Principal
from spec_serve.api.convert import Prepared
from spec_serve.api.generation import Generation, Numbered, Outbox, Pushes, failure
from spec_serve.api.service import MAX_GENERATIONS, Service
from spec_serve.api.session_shelf import Track
from spec_serve.api.tokenizing import tokenized
from spec_serve.api.version import __version__
from spec_serve.spec.request import RequestError

if TYPE_CHECKING:
    from spec_serve.api.program_session import Programs

log = logging.getLogger("spec_serve.session")

MOVED = 4409  # close code: another connection has taken over
MAX_UNREAD = 64  # answers waiting for a client that goes on talking
MAX_OVER = 64  # generations that have ended, kept for a resume
MAX_STARTING = 256  # requests and texts being read at once
REPLAY = 64  # missed messages handed out at once

REVOKED = m.Error("unauthorized", "this API key is not known here any more")
_CANCELLED = m.Usage(0, 0), m.Timings(0.0, 0.0, 0.0, 0.0)


class Preparing:
    """A request that is still being read; session: whose it is by now."""

    __slots__ = ("session",)

    def __init__(self, session: Session) -> None:
        self.session = session


class Session:
    """The generations of one connection. All methods belong to the loop's thread.

    wake: called when there is something to take. close: asks the owner to close its connection with
    this code, because another one took over; the owner then calls `drop`. trace: the traceparent
    that came with the connection.
    """

    def __init__(
        self,
        service: Service,
        principal: Principal,
        wake: Callable[[], None],
        close: Callable[[int], None],
        trace: str | None = None,
    ) -> None:
        self.principal, self._trace = principal, trace
        self._service, self._wake, self._close = service, wake, close
        self._shelf = service.shelf
        self.resume_token = self._shelf.token()
        self._outbox = Outbox(wake)
        self._push: Pushes | None = None
        self._control: list[m.Server] = []
        self._replay: deque[Numbered] = deque()
        self._running: dict[str, Generation | Preparing] = {}
        self._tracks: dict[str, Track] = {}
        self._starting: set[asyncio.Task[None]] = set()
        self._programs: Programs | None = None
        self._dropped = False
        self._shelf.add(self)

    # -- what owners ask

    @property
    def busy(self) -> bool:
        """Whether something runs or waits to be sent."""
        return bool(self._running or self._programs) or self.waiting

    @property
    def waiting(self) -> bool:
        """Whether there is something to take."""
        return bool(self._control or self._replay or len(self._outbox))

    @property
    def full(self) -> bool:
        """Too many answers wait: who does not read is not read from."""
        return len(self._control) > MAX_UNREAD

    @property
    def overflowing(self) -> bool:
        """The client reads too slowly to be waited for."""
        return self._outbox.overflowing

    def direct(self, push: Pushes | None) -> None:
        """While at most one generation runs, push its messages as they come.

        They skip `take` then, numbered all the same; what else waits is not overtaken.
        """
        self._push = push
        self._tune()

    def _tune(self) -> None:
        """Choose the shortest way that messages may take now."""
        push = self._push
        if push is None or len(self._running) > 1 or self._replay or self._dropped:
            self._outbox.direct(None)
        else:
            self._outbox.direct(self if self._tracks else push)

    def push(self, message: Numbered) -> None:
        """Keep a message for a resume, if it is to be kept, and push it."""
        self._keep([message])
        if self._push is not None:
            self._push.push(message)

    def greet(self) -> None:
        """Say hello, the first message."""
        service = self._service
        window = self._shelf.window_s
        session = secrets.token_hex(8)
        self.say(
            m.Hello(
                session, __version__, MAX_GENERATIONS, list(service.models),
                self.resume_token if window else "", window, programs=True,
            )
        )  # fmt: skip

    def say(self, message: m.Server) -> None:
        """Send a message that belongs to no generation."""
        self._control.append(message)
        self._wake()

    def take(self) -> list[m.Server]:
        """What is to be sent now, in order; more may be `waiting` after it."""
        taken: list[m.Server] = []
        if self._control:
            taken, self._control = self._control, taken
        replay = self._replay
        if replay:
            taken += [replay.popleft() for _ in range(min(REPLAY, len(replay)))]
            if replay:
                return taken
            self._tune()
        fresh = self._outbox.take()
        if self._tracks:
            self._keep(fresh)
        if not taken:
            return fresh  # type: ignore[return-value]
        taken += fresh
        return taken

    # -- what clients say

    def receive(self, message: m.Client) -> None:
        """Act on a message; answers come through `take`."""
        kind = type(message)
        if kind is m.Generate:
            self._generate(message)  # type: ignore[arg-type]
        elif kind is m.Cancel:
            self._cancel(message.gen)  # type: ignore[union-attr]
        elif kind is m.Ping:
            self.say(m.Pong(message.t, time.time()))  # type: ignore[union-attr]
        elif kind is m.Ack:
            track = self._tracks.get(message.gen)  # type: ignore[union-attr]
            if track is not None:
                self._acked(track, message.seq)  # type: ignore[union-attr]
        elif kind is m.Resume:
            self._resume(message)  # type: ignore[arg-type]
        elif kind is m.Tokenize:
            self._tokenize(message)  # type: ignore[arg-type]
        elif kind is m.RunProgram or kind is m.Called:
            self._program(message)  # type: ignore[arg-type]
        # An Auth was dealt with before there was a session.

    def refuse(self, error: m.BadMessage, gen: str | None) -> None:
        """Answer a message that can't be understood; gen: which it named, if any."""
        if gen in self._running:
            gen = None  # a second use of the id must not end the first
        self.say(m.Error("invalid_request", str(error), gen=gen, param=error.field or None))

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
        self._forget(gen)
        self._running[gen] = preparing = Preparing(self)
        if wire.resumable and self._shelf.window_s:
            self._tracks[gen] = Track(gen, self._shelf)
        self._tune()
        self._aside(self._begin(wire, preparing))

    def _program(self, message: m.RunProgram | m.Called) -> None:
        if self._programs is None:
            from spec_serve.api.program_session import Programs  # programs have sessions themselves

            service, full = self._service, lambda: self.full
            self._programs = Programs(service, self.principal, self.say, full)
        self._programs.receive(message)

    def _aside(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)

    def _tokenize(self, asked: m.Tokenize) -> None:
        if len(self._starting) >= MAX_STARTING:
            told = f"at most {MAX_STARTING} texts are read at once for one socket"
            self.say(m.Error("overloaded", told, gen=asked.ask, retryable=True))
        else:
            self._aside(self._read(asked))

    async def _read(self, asked: m.Tokenize) -> None:
        try:
            pieces = await tokenized(self._service, asked, self.principal)
        except RequestError as error:
            self.say(failure(error, asked.ask))
        except Exception:
            log.exception("a text could not be tokenized")
            self.say(m.Error("engine_error", "the text could not be read", gen=asked.ask))
        else:
            self.say(m.Tokens(asked.ask, pieces))

    async def _begin(self, wire: m.Generate, preparing: Preparing) -> None:
        if self._trace is not None:
            traces.caller.set(self._trace)
        try:
            prepared = await self._service.prepare(wire, principal=self.principal)
            preparing.session._admit(wire, prepared, preparing)
        except RequestError as error:
            preparing.session._failed(wire, error, preparing)
        except Exception:
            log.exception("a request could not be prepared")
            told = "the request could not be prepared"
            lost = RequestError("", told, "engine_error")
            preparing.session._failed(wire, lost, preparing)

    def _admit(self, wire: m.Generate, prepared: Prepared, preparing: Preparing) -> None:
        gen = wire.gen
        if self._running.get(gen) is preparing:  # else cancelled meanwhile
            made = self._service.start(prepared, gen, self._outbox, self._over)
            self._running[gen] = made

    def _failed(self, wire: m.Generate, error: RequestError, preparing: Preparing) -> None:
        if self._running.get(wire.gen) is preparing:
            del self._running[wire.gen]
            self._outbox.put(failure(error, wire.gen, wire))

    def _over(self, gen: str) -> None:
        self._running.pop(gen, None)
        self._tune()

    def _cancel(self, gen: str) -> None:
        if gen not in self._running:
            if self._programs is not None and gen in self._programs:
                self._programs.cancel(gen)
            return
        work = self._running[gen]
        if isinstance(work, Generation):
            self._service.link.cancel(work.id)
            return
        del self._running[gen]
        usage, timings = _CANCELLED
        self._outbox.put(
            m.Finished(gen=gen, seq=0, reason="cancelled", usage=usage, timings=timings)
        )

    def cancel_all(self) -> None:
        """End every generation, whose last messages still come, and every program."""
        if self._programs is not None:
            self._programs.close()
        for gen in list(self._running):
            self._cancel(gen)

    # -- dropping and resuming

    def drop(self, resumable: bool) -> None:
        """The connection is gone. resumable: not on purpose, so that another one may take over.

        Generations that were not asked to be resumable end; the others go on for the window.
        """
        if self._dropped:
            return
        self._dropped = True
        if self._programs is not None:
            self._programs.close()
        self._wake = self._drain
        self._outbox.wake = self._drain
        self._tune()
        self._control.clear()
        self._replay.clear()
        if not (resumable and self._tracks):
            return self.expire()
        for gen in list(self._running):
            if gen not in self._tracks:
                self._cancel(gen)
        self._drain()
        if self._tracks:
            self._shelf.hold(self)

    def expire(self) -> None:
        """Nobody came back within the window: end what runs, keep nothing."""
        self._shelf.remove(self)
        self.cancel_all()
        for gen in list(self._tracks):
            self._forget(gen)
        self._drain()

    def _drain(self) -> None:
        """Without a connection: what would be sent is kept if it is to be kept."""
        self._control.clear()
        self._keep(self._outbox.take())

    def _keep(self, fresh: list[Numbered]) -> None:
        tracks, connected = self._tracks, not self._dropped
        for message in fresh:
            track = tracks.get(message.gen)  # type: ignore[arg-type]
            if track is None:
                continue
            track.keep(message)
            if connected:
                track.sent = track.next
            if type(message) is m.Error or (type(message) is m.Finished and message.last):
                track.over = True
                self._trim()
            elif track.lost:
                self._cancel(track.gen)
                self._forget(track.gen)
        if self._dropped and not self._tracks:
            self._shelf.remove(self)

    def _trim(self) -> None:
        over = [track.gen for track in self._tracks.values() if track.over]
        for gen in over[: max(0, len(over) - MAX_OVER)]:
            self._forget(gen)

    def _acked(self, track: Track, seq: int) -> None:
        track.ack(seq)
        if track.over and not track.kept:
            self._forget(track.gen)

    def _forget(self, gen: str) -> None:
        track = self._tracks.pop(gen, None)
        if track is not None:
            track.clear()

    def _resume(self, asked: m.Resume) -> None:
        """Take over generations of another session; what can't go on is told so, one by one."""
        other = self._shelf.find(asked.resume_token, self.principal)
        moved: list[str] = []
        errors: list[m.Error] = []
        if other is self:
            other = None
        elif other is not None:
            other.yield_up()
        for gen, seq in asked.gens.items():
            if gen in self._running:
                told = f"gen: {gen!r} is already running on this socket"
                errors.append(m.Error("duplicate_id", told, param="gens"))
            elif len(self._running) >= MAX_GENERATIONS:
                told = f"at most {MAX_GENERATIONS} generations run at once on one socket"
                errors.append(m.Error("overloaded", told, param="gens", retryable=True))
            else:
                found = None if other is None else other.hand_over(gen, seq)
                if found is None:
                    told = f"{gen}: what came after message {seq} is not there any more"
                    errors.append(m.Error("resume_gap", told, gen=gen, param="gens"))
                else:
                    self._adopt(*found)
                    moved.append(gen)
        self._control += [m.Resumed(moved), *errors]
        self._tune()
        self._wake()

    def yield_up(self) -> None:
        """Another connection is taking over: ours closes, if it still stands."""
        if not self._dropped:
            self.drop(resumable=True)
            self._close(MOVED)

    def hand_over(self, gen: str, seq: int) -> tuple[Track, Generation | Preparing | None] | None:
        """Give a generation away, its messages up to seq acknowledged; None if that can't be.

        With what makes its further messages, None if it has ended.
        """
        track = self._tracks.pop(gen, None)
        if track is None:
            return None
        if track.since(seq) is None:
            self._cancel(gen)
            track.clear()
            found = None
        else:
            self._outbox.leave(gen)
            found = track, self._running.pop(gen, None)
        if not self._tracks:
            self._shelf.remove(self)
        return found

    def _adopt(self, track: Track, work: Generation | Preparing | None) -> None:
        gen = track.gen
        self._forget(gen)
        self._tracks[gen] = track
        self._replay.extend(message for message, _ in track.kept)
        track.sent = track.next
        if work is None:
            return
        self._running[gen] = work
        self._outbox.go_on(gen, track.next)
        if isinstance(work, Generation):
            work.move(self._outbox, self._over)
        else:
            work.session = self
