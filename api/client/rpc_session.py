"""A gRPC session as a wire: the WebSocket's messages over one call of the method `Session`.

Knows the call and its protobuf; what the messages mean is the client's business.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import grpc

from spec_serve.api import messages as m
from spec_serve.api import program_wire as w
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.client.answers import ConnectionLost, ServerError
from spec_serve.client.rpc import GrpcClient
from spec_serve.client.rpc_convert import KNOWN, event, failure, to_proto
from spec_serve.client.tls import Tls

LOST, RESTART, SLOW, MOVED = 1006, 1012, 4408, 4409  # as a WebSocket would be closed
CLOSE_S = 2.0
_PROGRAMS = m.Codec(m.MSGPACK)


class SessionWire:
    """One call of Session."""

    def __init__(self, client: GrpcClient) -> None:
        self._client = client
        self._call = client.session()
        self._writing = asyncio.Lock()

    async def send(self, message: m.Client) -> None:
        """Say something."""
        # gRPC takes one write at a time, and gives a call up whose write is cancelled.
        await asyncio.shield(asyncio.ensure_future(self._write(request(message))))

    async def _write(self, said: pb.SessionRequest) -> None:
        try:
            async with self._writing:
                await self._call.write(said)
        except (grpc.RpcError, asyncio.InvalidStateError):
            raise ConnectionLost(LOST) from None
        except asyncio.CancelledError:
            self._or_lost()

    async def receive(self) -> m.Server:
        """What is said next. Raises ServerError for a call that is refused."""
        try:
            said = await self._call.read()
        except grpc.RpcError as error:
            raise _ended(error) from None
        except asyncio.CancelledError:
            self._or_lost()
        if said is grpc.aio.EOF:
            raise ConnectionLost(1000)
        return message(said)

    def _or_lost(self) -> None:
        """A cancelled call cancels who waits for it, too; only the latter may go on so."""
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise ConnectionLost(LOST) from None

    async def close(self, code: int = 1000) -> None:
        """Say that nothing more comes, and let the server end the call."""
        if not self._call.done():
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, TimeoutError):
                await self._call.done_writing()
                await asyncio.wait_for(self._call.code(), CLOSE_S)
        self._call.cancel()
        await self._client.close()

    def abort(self) -> None:
        """End the call."""
        self._call.cancel()


async def open_session(
    url: str, api_key: str | None, tls: Tls | None, connect_s: float
) -> SessionWire:
    """Connect. Raises ConnectionLost."""
    client = GrpcClient(url, api_key=api_key, tls=tls, connect_s=connect_s)
    await client.__aenter__()
    return SessionWire(client)


def _ended(error: Any) -> ConnectionLost | ServerError:
    made = failure(error)
    if isinstance(made, ServerError):
        if made.code in ("draining", "engine_error"):
            return ConnectionLost(RESTART, str(made))
        if made.code == "rate_limited" and not made.retryable:
            return ConnectionLost(SLOW, str(made))
        return made
    moved = error.code() == grpc.StatusCode.ABORTED
    return ConnectionLost(MOVED if moved else LOST, str(made))


def request(said: m.Client) -> pb.SessionRequest:
    """What a client says, as protobuf. Raises BadMessage."""
    if isinstance(said, m.Generate):
        asked = pb.SessionGenerate(
            gen=said.gen, request=to_proto(said), timeout_s=said.timeout_s,
            resumable=said.resumable,
        )  # fmt: skip
        return pb.SessionRequest(generate=asked)
    if isinstance(said, m.Cancel):
        return pb.SessionRequest(cancel=pb.SessionCancel(gen=said.gen))
    if isinstance(said, m.Ping):
        return pb.SessionRequest(ping=pb.SessionPing(t=said.t))
    if isinstance(said, m.Ack):
        return pb.SessionRequest(ack=pb.SessionAck(gen=said.gen, seq=said.seq))
    if isinstance(said, m.Tokenize):
        return pb.SessionRequest(tokenize=_tokenize(said))
    if isinstance(said, w.RunProgram | w.Called):
        return pb.SessionRequest(program=_PROGRAMS.encode(said))
    assert isinstance(said, m.Resume), "a key goes with the call"
    return pb.SessionRequest(
        resume=pb.SessionResume(resume_token=said.resume_token, gens=said.gens)
    )


def _tokenize(said: m.Tokenize) -> pb.SessionTokenize:
    def parts(given: list[str | None]) -> list[pb.Part]:
        return [pb.Part() if part is None else pb.Part(text=part) for part in given]

    made = pb.SessionTokenize(ask=said.ask)
    if said.text is not None:
        made.text.CopyFrom(pb.Parts(parts=parts(said.text)))
    if said.begun is not None:
        made.begun.CopyFrom(pb.Parts(parts=parts(said.begun)))
    if said.turns is not None:
        turns = [pb.Turn(role=turn.role, parts=parts(turn.parts)) for turn in said.turns]
        made.turns.CopyFrom(pb.Turns(turns=turns))
    return made


def message(said: pb.SessionEvent) -> m.Server:
    """What a server says."""
    kind = said.WhichOneof("event")
    if kind == "generation":
        return event(said.generation.gen, said.generation.event)
    if kind == "error":
        error = said.error
        return m.Error(
            KNOWN.get(error.code.upper(), "engine_error"),
            error.message,
            error.gen if error.HasField("gen") else None,
            error.seq if error.HasField("seq") else None,
            error.param or None,
            error.retryable,
            error.retry_after_ms,
        )
    if kind == "hello":
        hello = said.hello
        return m.Hello(
            hello.session, hello.version, hello.max_generations, list(hello.models),
            hello.resume_token, hello.resume_window_s, hello.programs,
        )  # fmt: skip
    if kind == "resumed":
        return m.Resumed(list(said.resumed.gens))
    if kind == "tokens":
        return m.Tokens(said.tokens.ask, [list(piece.ids) for piece in said.tokens.pieces])
    if kind == "program":
        return _PROGRAMS.server_message(said.program)
    if kind == "pong":
        return m.Pong(said.pong.t, said.pong.server_t)
    return m.Draining(said.draining.deadline_s)
