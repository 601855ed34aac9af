"""The client of a session: many generations at once over one WebSocket, or one gRPC call.

Goes on after a drop if told to. Speaks api/messages.py and nothing else. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import ssl
from collections import deque
from collections.abc import AsyncGenerator, Coroutine, Sequence
from time import monotonic
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit, urlunsplit

from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.client.answers import (
    Answer,
    ConnectionLost,
    GenerationEvent,
    Messages,
    ServerError,
    gathered_from,
    request,
)
from spec_serve.client.programs import ProgramDesk
from spec_serve.client.streams import Stream
from spec_serve.client.tls import Tls
from spec_serve.client.wires import SocketWire, Wire, greeting, open_socket

PATH = "/v1/stream"
CONNECT_S = 10.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.05, 2.0
# Closed by a restart, a failure or the network; other codes say that coming back is of no use.
COME_BACK = (1001, 1006, 1011, 1012, 1013)


def address(url: str) -> str:
    """ws(s)://host:port/v1/stream from that, from http(s)://host:port or from host:port.

    grpc(s)://host:port stays as it is.
    """
    parts = urlsplit(url if "://" in url else f"ws://{url}")
    scheme = {"http": "ws", "https": "wss"}.get(parts.scheme, parts.scheme)
    if scheme in ("grpc", "grpcs") and parts.netloc:
        return url
    if scheme not in ("ws", "wss") or not parts.netloc:
        raise ValueError(f"url: {url!r} is not an address such as ws://127.0.0.1:8000")
    return urlunsplit(parts._replace(scheme=scheme, path=parts.path.rstrip("/") or PATH))


class Client:
    """`async with Client(url) as client`.

    url: ws://host:port, or grpc://host:port for a session over gRPC. codec: messages.MSGPACK or
    messages.JSON. origin: as a browser would say it. api_key: sent with the handshake. tls: for
    wss:// and grpcs://, whom to trust. resume: come back after a drop and go on where
    generations were, within the window the server gives. silence_s: a generation that says nothing
    for so long ends with TimeoutError.

    Connecting raises ServerError if refused, OSError if nobody listens, TimeoutError.
    """

    def __init__(
        self,
        url: str,
        codec: str = m.MSGPACK,
        origin: str | None = None,
        *,
        api_key: str | None = None,
        tls: Tls | ssl.SSLContext | None = None,
        resume: bool = False,
        connect_s: float = CONNECT_S,
        silence_s: float | None = None,
    ) -> None:
        self.url = address(url)
        self.hello: m.Hello | None = None
        self.draining = False
        self.errors: list[m.Error] = []  # those that belong to no generation
        self.resumes = 0  # how often a drop was mended
        self._codec = m.Codec(codec)
        self._origin, self._resume = origin, resume
        self._connect_s, self._silence_s = connect_s, silence_s
        self._api_key = api_key
        self._over_grpc = self.url.startswith("grpc")
        if self._over_grpc and isinstance(tls, ssl.SSLContext):
            raise ValueError("tls: gRPC takes files (Tls), no SSLContext")
        self._tls = tls if self._over_grpc or not isinstance(tls, Tls) else tls.context()
        self._wire: Wire | None = None
        self._reader: asyncio.Task[None] | None = None
        self._streams: dict[str, Stream] = {}
        self._pings: deque[asyncio.Future[m.Pong]] = deque()
        self._asks: dict[str, asyncio.Future[list[list[int]]]] = {}
        self._ids = itertools.count()
        self.programs = ProgramDesk(self._say_surely)
        self._opening = asyncio.Lock()
        self._asides: set[asyncio.Task[None]] = set()
        self._up = False
        self._closed = False
        self._lost: int | None = None

    async def __aenter__(self) -> Self:
        await self._connect()
        self._reader = asyncio.create_task(self._serve())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything; what runs is cancelled by the server."""
        self._closed = True
        assert self._wire is not None and self._reader is not None
        for stream in list(self._streams.values()):
            if self._up:  # or the server would keep it running
                with contextlib.suppress(ConnectionLost):
                    await self._say(m.Cancel(stream.request.gen))
        await self._wire.close()
        if not self._up:
            self._reader.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self._reader
        self._end_all()

    async def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        token_ids: list[int] | None = None,
        gen: str = "",
        **options: Any,
    ) -> AsyncGenerator[GenerationEvent, None]:
        """Events of one generation as they come; options: further fields of `Generate`.

        Leaving the loop early cancels the generation. Raises BadMessage for a request that breaks
        the schema, ServerError, ConnectionLost, TimeoutError.
        """
        gen = gen or f"g{next(self._ids)}"
        if self._resume:
            options = {"resumable": True, **options}
        wire = request(gen, prompt, messages, token_ids, options)
        if gen in self._streams:
            raise ValueError(f"gen: {gen!r} is already running")
        if self._resume:
            await self._ensure()
        stream = self._streams[gen] = Stream(wire)
        over = False
        try:
            await self._ask(stream)
            while not over:
                try:
                    event = await stream.next(self._silence_s)
                except (ServerError, ConnectionLost):
                    over = True
                    raise
                over = isinstance(event, m.Finished) and event.last
                yield event
        finally:
            # A stream that is left early stays known until its end has come.
            stream.left = not over
            if over:
                self._streams.pop(gen, None)
            elif self._up:
                with contextlib.suppress(ConnectionLost):
                    await self._say(m.Cancel(gen))

    async def complete(
        self, prompt: str | None = None, *, token_ids: list[int] | None = None, **options: Any
    ) -> Answer:
        """The whole answer to a prompt, token ids included. Options and errors as `generate`."""
        options = {"ids": True, **options}
        return await gathered_from(self.generate(prompt=prompt, token_ids=token_ids, **options))

    async def chat(self, messages: Messages, **options: Any) -> Answer:
        """The whole answer to a conversation, or to one message. Otherwise as `complete`."""
        return await gathered_from(self.generate(messages=messages, **{"ids": True, **options}))

    async def cancel(self, gen: str) -> None:
        """End a generation; its Finished still comes."""
        await self._say_surely(m.Cancel(gen))

    async def ping(self) -> m.Pong:
        """One round trip. Raises ConnectionLost where the answer can't come any more."""
        loop = asyncio.get_running_loop()
        while True:
            answer: asyncio.Future[m.Pong] = loop.create_future()
            self._pings.append(answer)
            try:
                await self._say_surely(m.Ping(loop.time()))
            except BaseException:
                answer.cancel()
                raise
            try:
                return await answer
            except ConnectionLost:
                if not self._resume or self._closed:
                    raise

    async def tokenize(
        self,
        *,
        text: Sequence[str | None] | None = None,
        turns: Sequence[m.Turn] | None = None,
        begun: Sequence[str | None] | None = None,
    ) -> list[list[int]]:
        """Ids around generated tokens; fields as of messages.Tokenize.

        Raises ServerError, ConnectionLost, BadMessage for text no encoding has.
        """
        lists = [None if given is None else list(given) for given in (text, begun)]
        ask = f"t{next(self._ids)}"
        asked = m.Tokenize(ask, lists[0], None if turns is None else list(turns), lists[1])
        while True:
            answer = self._asks[ask] = asyncio.get_running_loop().create_future()
            try:
                await self._say_surely(asked)
                pieces: list[list[int]] = await answer
                return pieces
            except ConnectionLost:
                if not self._resume or self._closed:
                    raise
            except UnicodeEncodeError:
                raise m.BadMessage("", "a text holds half a surrogate pair") from None
            finally:
                self._asks.pop(ask, None)
                answer.cancel()

    def abort(self) -> None:
        """Drop the connection without a word, as a crash would."""
        assert self._wire is not None
        self._wire.abort()

    async def send_raw(self, frame: bytes | str) -> None:
        """Send a WebSocket's frame as it is, for tests of a server's manners."""
        assert isinstance(self._wire, SocketWire)
        await self._wire.socket.send(frame)

    async def _connect(self) -> None:
        tls, key, within_s = self._tls, self._api_key, self._connect_s
        if self._over_grpc:
            from spec_serve.client.rpc_session import open_session

            assert not isinstance(tls, ssl.SSLContext)
            wire: Wire = await open_session(self.url, key, tls, within_s)
        else:
            assert not isinstance(tls, Tls)
            wire = await open_socket(self.url, self._codec, self._origin, key, tls, within_s)
        try:
            self.hello = await greeting(wire, within_s)
        except BaseException:
            await wire.close()
            raise
        self._wire, self._up = wire, True
        self._lost, self.draining = None, False

    async def _ensure(self) -> None:
        """Connect anew where all attempts had been given up."""
        async with self._opening:
            if self._closed or self._reader is None or not self._reader.done():
                return
            await self._connect()
            self._reader = asyncio.create_task(self._serve())

    async def _ask(self, stream: Stream) -> None:
        if self._up or not self._resume:
            stream.homes = [self._token]
            try:
                await self._say(stream.request)
            except ConnectionLost:
                if not self._resume:  # else it is asked for once the connection is back
                    raise

    async def _say(self, message: m.Client) -> None:
        assert self._wire is not None
        await self._wire.send(message)

    async def _say_surely(self, message: m.Client) -> None:
        """Say something; while the connection is being mended, once that is done."""
        while True:
            if self._resume:
                await self._ensure()
            try:
                return await self._say(message)
            except ConnectionLost:
                if not self._resume or self._closed:
                    raise
            await asyncio.sleep(FIRST_DELAY_S)

    async def _serve(self) -> None:
        while True:
            await self._read()
            if not await self._back():
                break
        self._end_all()

    def _end_all(self) -> None:
        for stream in self._streams.values():
            stream.fail(ConnectionLost(self._lost))
        self._streams.clear()

    async def _read(self) -> None:
        assert self._wire is not None
        try:
            while True:
                message = await self._wire.receive()
                stream = None
                if self._resume and isinstance(message, m.Delta | m.Finished):
                    stream = self._streams.get(message.gen)
                self._take(message)
                if stream is not None:
                    ack = stream.ack(isinstance(message, m.Finished))
                    if ack is not None:
                        await self._say(ack)
        except ConnectionLost as lost:
            self._lost = lost.code or 1006
        except (m.BadMessage, ServerError):
            self._lost = 1002
            await self._wire.close(1002)
        finally:
            self._up = False
            while self._pings:
                if not (answer := self._pings.popleft()).done():
                    answer.set_exception(ConnectionLost(self._lost))
            self.programs.lost(self._lost)
            for asked in self._asks.values():
                if not asked.done():
                    asked.set_exception(ConnectionLost(self._lost))

    async def _back(self) -> bool:
        """Connect again and take over what ran; False when that is of no use or time is up."""
        if not self._resume or self._closed or self._lost not in COME_BACK:
            return False
        assert self.hello is not None and self._wire is not None
        await self._wire.close()
        window = self.hello.resume_window_s
        end, delay = monotonic() + max(window, self._connect_s), FIRST_DELAY_S
        code = self._lost
        while not self._closed and monotonic() < end:
            try:
                await self._connect()
                await self._take_over()
            except ServerError as error:
                if not error.retryable:
                    break
            except (OSError, TimeoutError):  # ConnectionLost too
                pass
            else:
                self.resumes += 1
                return True
            await asyncio.sleep(delay * random.uniform(0.5, 1.0))
            delay = min(2 * delay, LONGEST_DELAY_S)
        self._lost = code
        return False

    @property
    def _token(self) -> str:
        return self.hello.resume_token if self.hello is not None else ""

    async def _take_over(self) -> None:
        """On a new socket, go on with what ran on the old one."""
        for stream in list(self._streams.values()):
            if stream.request.resumable:
                await self._move(stream)
            else:
                del self._streams[stream.request.gen]
                stream.fail(ConnectionLost(1006))

    async def _move(self, stream: Stream) -> None:
        """Ask for a stream at the newest home that was not asked yet."""
        gen, token = stream.request.gen, self._token
        homes = [home for home in stream.homes if home and home != token]
        if homes:
            stream.asked, stream.homes = homes[-1], [*homes, token]
            await self._say(m.Resume(stream.asked, {gen: stream.seen}))
            if stream.left:
                await self._say(m.Cancel(gen))
        elif stream.seen < 0 and not stream.left:  # nothing came of it: begin anew
            await self._ask(stream)
        else:
            del self._streams[gen]
            told = f"{gen}: what came after message {stream.seen} is not there any more"
            stream.take(m.Error("resume_gap", told, gen=gen))

    def _aside(self, work: Coroutine[Any, Any, None]) -> None:
        async def done() -> None:
            with contextlib.suppress(ConnectionLost):
                await work

        task = asyncio.create_task(done())
        self._asides.add(task)
        task.add_done_callback(self._asides.discard)

    def _take(self, message: m.Server) -> None:
        if isinstance(message, m.Pong):
            if self._pings and not (answer := self._pings.popleft()).done():
                answer.set_result(message)
            return
        if isinstance(message, m.Draining):
            self.draining = True
            return
        if isinstance(message, m.Hello):
            return
        if isinstance(message, m.Resumed):
            for name in message.gens:
                if name in self._streams:
                    self._streams[name].homes = [self._token]
            return
        if isinstance(message, m.Tokens):
            self._answer(message.ask, message.pieces)
            return
        if self.programs.take(message) or isinstance(message, w.Answers):
            return
        gen = message.gen
        if isinstance(message, m.Error) and gen in self._asks:
            self._answer(gen, ServerError(message))
            return
        stream = self._streams.get(gen) if gen is not None else None
        if stream is None or gen is None:
            if isinstance(message, m.Error):
                self.errors.append(message)
        elif isinstance(message, m.Error) and message.code == "resume_gap" and self._resume:
            stream.homes = [home for home in stream.homes if home != stream.asked]
            self._aside(self._move(stream))
        elif stream.take(message):
            self._streams.pop(gen, None)
            if isinstance(message, m.Delta):  # out of step: the server is not to go on
                self._aside(self._say(m.Cancel(gen)))

    def _answer(self, ask: str | None, found: list[list[int]] | ServerError) -> None:
        answer = self._asks.get(ask or "")
        if answer is None or answer.done():
            return
        if isinstance(found, ServerError):
            answer.set_exception(found)
        else:
            answer.set_result(found)
