"""gRPC's Session: what the WebSocket does, in protobuf over one bidirectional call.

Turns protobuf into the messages of api/session.py's Session and its answers into protobuf. A client
that ends its side gets what still runs, then the call's end; one whose call breaks may resume in
another. Knows no engine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable
from typing import Any

import grpc
import msgspec

from spec_serve.api import grpc_convert as convert
from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.api.auth import Principal
from spec_serve.api.grpc_reader import Patience
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.service import Service
from spec_serve.api.session import REVOKED, Session

SAYS = ("generate", "cancel", "ping", "resume", "ack", "tokenize", "program")
MAX_BAD = 100  # requests nobody understands, before the call is ended
_PROGRAMS = m.Codec(m.MSGPACK)
READ_AGAIN_S = 0.05  # a client that does not read its answers is not read from for so long


def client_message(request: pb.SessionRequest) -> m.Client:
    """What a client said. Raises BadMessage."""
    kind = request.WhichOneof("say")
    if kind is None:
        raise m.BadMessage("say", "say: must be one of " + ", ".join(SAYS))
    if kind == "generate":
        asked = request.generate
        if asked.request.request_id:
            told = "request.request_id: the server makes the id of a generation in a session"
            raise m.BadMessage("request.request_id", told)
        timeout = asked.timeout_s if asked.HasField("timeout_s") else None
        return convert.generate(
            asked.request, gen=asked.gen, timeout_s=timeout, resumable=asked.resumable
        )
    if kind == "program":
        made = _PROGRAMS.client_message(request.program)
        if not isinstance(made, m.RunProgram | m.Called):
            raise m.BadMessage("program", "program: must be a program, or what a call gave")
        return made
    said = getattr(request, kind)
    values: dict[str, Any]
    message: type[m.Cancel | m.Ping | m.Resume | m.Ack | m.Tokenize]
    if kind == "cancel":
        message, values = m.Cancel, {"gen": said.gen}
    elif kind == "ping":
        message, values = m.Ping, {"t": said.t}
    elif kind == "ack":
        message, values = m.Ack, {"gen": said.gen, "seq": said.seq}
    elif kind == "tokenize":
        message, values = m.Tokenize, _tokenize(said)
    else:
        gens = dict(said.gens)
        message, values = m.Resume, {"resume_token": said.resume_token, "gens": gens}
    try:
        said_so = msgspec.convert({"type": kind, **values}, message)
    except msgspec.ValidationError as error:
        raise m.bad_message(error) from None
    m.finite(said_so)
    return said_so


def _tokenize(said: pb.SessionTokenize) -> dict[str, Any]:
    def parts(given: Iterable[pb.Part]) -> list[str | None]:
        return [part.text if part.HasField("text") else None for part in given]

    values: dict[str, Any] = {"ask": said.ask}
    for name in ("text", "begun"):
        if said.HasField(name):
            values[name] = parts(getattr(said, name).parts)
    if said.HasField("turns"):
        turns = said.turns.turns
        values["turns"] = [{"role": turn.role, "parts": parts(turn.parts)} for turn in turns]
    return values


def server_event(message: m.Server) -> pb.SessionEvent:
    """What the server says, as the proto has it."""
    if isinstance(message, m.Started | m.Delta | m.PromptLogprobs | m.Finished):
        generation = pb.SessionGeneration(gen=message.gen, event=convert.event(message))
        return pb.SessionEvent(generation=generation)
    if isinstance(message, m.Error):
        said, field = convert.named(message)
        error = pb.SessionError(
            code=message.code,
            message=said,
            gen=message.gen,
            seq=message.seq,
            param=field,
            retryable=message.retryable,
            retry_after_ms=message.retry_after_ms,
        )
        return pb.SessionEvent(error=error)
    if isinstance(message, m.Hello):
        return pb.SessionEvent(hello=pb.SessionHello(**msgspec.structs.asdict(message)))
    if isinstance(message, m.Pong):
        return pb.SessionEvent(pong=pb.SessionPong(t=message.t, server_t=message.server_t))
    if isinstance(message, m.Resumed):
        return pb.SessionEvent(resumed=pb.SessionResumed(gens=message.gens))
    if isinstance(message, m.Tokens):
        pieces = [pb.TokenIds(ids=ids) for ids in message.pieces]
        return pb.SessionEvent(tokens=pb.SessionTokens(ask=message.ask, pieces=pieces))
    if isinstance(message, w.Answers):
        return pb.SessionEvent(program=_PROGRAMS.encode(message))
    return pb.SessionEvent(draining=pb.SessionDraining(deadline_s=message.deadline_s))


class SessionCall:
    """One call of the Session method."""

    def __init__(self, service: Service, principal: Principal, context: Any) -> None:
        self._context = context
        self._wake = asyncio.Event()
        self._end: tuple[grpc.StatusCode, str, Any] | None = None
        self._bad = 0
        self._revoked = False
        self._session = Session(service, principal, self._wake.set, self._moved)

    @property
    def principal(self) -> Principal:
        """Whose it is."""
        return self._session.principal

    @property
    def busy(self) -> bool:
        """Whether something runs or waits to be sent."""
        return self._session.busy

    def say(self, message: m.Server) -> None:
        """Send a message that belongs to no generation."""
        self._session.say(message)

    def cancel_all(self) -> None:
        """End every generation."""
        self._session.cancel_all()

    def close(self) -> None:
        """The server goes away: end the call once what waits has been sent."""
        error = m.Error("draining", "the server is shutting down", retryable=True)
        self._finish(*convert.status(error))

    def revoke(self) -> None:
        """Its key is in force no longer."""
        self._session.cancel_all()
        self._revoked = True
        self._finish(*convert.status(REVOKED))

    def _moved(self, code: int) -> None:
        self._finish(grpc.StatusCode.ABORTED, "another session has taken over", ())

    def _finish(self, code: grpc.StatusCode, said: str, trailing: Any) -> None:
        self._end = self._end or (code, said, trailing)
        self._wake.set()

    async def serve(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        """Until either side ends the call."""
        session = self._session
        session.greet()
        reader = asyncio.create_task(self._read(requests))
        reader.add_done_callback(lambda task: self._wake.set())
        patience = Patience(self._context, lambda: session.overflowing, session.cancel_all)
        broken = True
        try:
            await self._write(reader)
            broken = False
        finally:
            patience.close()
            reader.cancel()
            broken = broken or self._end is not None
            session.drop(resumable=broken and not self._revoked)
        if self._end is not None:
            await self._context.abort(*self._end)

    async def _read(self, requests: AsyncIterator[pb.SessionRequest]) -> None:
        session = self._session
        async for request in requests:
            while session.full:
                await asyncio.sleep(READ_AGAIN_S)
            try:
                session.receive(client_message(request))
            except m.BadMessage as error:
                gen = request.generate.gen if request.HasField("generate") else ""
                session.refuse(error, gen or None)
                self._bad += 1
                if self._bad >= MAX_BAD:
                    told = "too many requests that can't be understood"
                    return self._finish(grpc.StatusCode.INVALID_ARGUMENT, told, ())

    async def _write(self, reader: asyncio.Task[None]) -> None:
        session, write = self._session, self._context.write
        usual = pb.SessionEvent()
        reused = convert.Reused(usual.generation.event)
        while True:
            await self._wake.wait()
            self._wake.clear()
            while session.waiting:
                for message in session.take():
                    if type(message) is m.Delta and reused.fill(message):
                        usual.generation.gen = message.gen
                        await write(usual)  # encoded before this waits
                    else:
                        await write(server_event(message))
            if self._end is not None:
                return
            if reader.done():
                reader.result()  # bytes that are no message end the call
                if not session.busy:
                    return
