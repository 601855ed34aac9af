"""The gRPC clients, async and sync: one call a generation, with the interface of the WebSocket's.

A channel mends itself after a drop; a generation that ran is then lost, as gRPC has it. Knows no
protobuf beyond making calls.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import queue
from collections.abc import AsyncGenerator, Generator
from time import monotonic
from types import TracebackType
from typing import Any, Self
from urllib.parse import urlsplit

import grpc

from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.client.answers import (
    Answer,
    ConnectionLost,
    GenerationEvent,
    Messages,
    gathered,
    gathered_from,
    request,
)
from spec_serve.client.rpc_convert import event, failure, to_proto
from spec_serve.client.tls import Tls

CONNECT_S = 10.0
_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.http2.max_pings_without_data", 0),
)

# Whether a server is there is known: refused is not tried again.
_SETTLED = (
    grpc.ChannelConnectivity.READY,
    grpc.ChannelConnectivity.TRANSIENT_FAILURE,
    grpc.ChannelConnectivity.SHUTDOWN,
)


def address(url: str) -> str:
    """host:port from that or from grpc://host:port."""
    where = urlsplit(url).netloc if "://" in url else url
    if not where:
        raise ValueError(f"address: {url!r} is not an address such as 127.0.0.1:50051")
    return where


class _Caller:
    """What both clients know of a server."""

    def __init__(
        self,
        url: str,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        connect_s: float = CONNECT_S,
    ) -> None:
        self.address = address(url)
        if tls is None and url.startswith("grpcs://"):
            tls = Tls()
        self._credentials = None
        if tls is not None:
            self._credentials = grpc.ssl_channel_credentials(*tls.parts())
        self._metadata = (("authorization", f"Bearer {api_key}"),) if api_key else None
        self._connect_s = connect_s
        self._ids = itertools.count()
        self._channel: Any = None
        self._stub: Any = None

    def _open(self, kind: Any) -> None:
        if self._credentials is None:
            self._channel = kind.insecure_channel(self.address, options=_OPTIONS)
        else:
            self._channel = kind.secure_channel(self.address, self._credentials, options=_OPTIONS)
        self._stub = pb_grpc.SpecServeStub(self._channel)  # type: ignore[no-untyped-call]

    def _call(
        self,
        prompt: str | None,
        messages: Messages | None,
        token_ids: list[int] | None,
        gen: str,
        options: dict[str, Any],
    ) -> tuple[str, Any]:
        """Begin a generation: its gen and the call."""
        wire = request(gen or f"g{next(self._ids)}", prompt, messages, token_ids, options)
        asked = to_proto(wire, gen)
        return wire.gen, self._stub.Generate(
            asked, timeout=wire.timeout_s, metadata=self._metadata
        )


class GrpcClient(_Caller):
    """`async with GrpcClient("127.0.0.1:50051") as client`.

    api_key: sent with every call. tls: whom to trust; also made by an address grpcs://.
    Connecting raises ConnectionLost if nobody answers within connect_s seconds.
    """

    async def __aenter__(self) -> Self:
        self._open(grpc.aio)
        channel, state = self._channel, None
        try:
            async with asyncio.timeout(self._connect_s):
                while (state := channel.get_state(try_to_connect=True)) not in _SETTLED:
                    await channel.wait_for_state_change(state)
        except TimeoutError:
            pass
        if state != grpc.ChannelConnectivity.READY:
            await self.close()
            raise ConnectionLost(None, f"{self.address}: no gRPC server answers")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """End everything; what runs is cancelled."""
        await self._channel.close()

    def session(self) -> Any:
        """A call of the method Session."""
        return self._stub.Session(metadata=self._metadata)

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

        gen: also the id of the request, unique in the whole server. Leaving the loop early cancels
        the generation. Raises BadMessage, ServerError, ConnectionLost.
        """
        name, call = self._call(prompt, messages, token_ids, gen, options)
        try:
            async for said in call:
                yield event(name, said)
        except grpc.RpcError as error:
            raise failure(error) from None
        finally:
            call.cancel()

    async def complete(
        self, prompt: str | None = None, *, token_ids: list[int] | None = None, **options: Any
    ) -> Answer:
        """The whole answer to a prompt, token ids included."""
        options = {"ids": True, **options}
        return await gathered_from(self.generate(prompt=prompt, token_ids=token_ids, **options))

    async def chat(self, messages: Messages, **options: Any) -> Answer:
        """The whole answer to a conversation, or to one message."""
        return await gathered_from(self.generate(messages=messages, **{"ids": True, **options}))

    async def cancel(self, gen: str) -> None:
        """End a generation by its id, whoever started it; its Finished still comes."""
        try:
            await self._stub.Abort(pb.AbortRequest(request_ids=[gen]), metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure(error) from None


class SyncGrpcClient(_Caller):
    """`with SyncGrpcClient("127.0.0.1:50051") as client`; otherwise as `GrpcClient`."""

    def __enter__(self) -> Self:
        self._open(grpc)
        states = queue.SimpleQueue[Any]()
        self._channel.subscribe(states.put, try_to_connect=True)
        state, end = None, monotonic() + self._connect_s
        with contextlib.suppress(queue.Empty):
            while state not in _SETTLED:
                state = states.get(timeout=max(0.0, end - monotonic()))
        self._channel.unsubscribe(states.put)
        if state != grpc.ChannelConnectivity.READY:
            self.close()
            raise ConnectionLost(None, f"{self.address}: no gRPC server answers")
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """End everything; what runs is cancelled."""
        self._channel.close()

    def generate(
        self,
        *,
        prompt: str | None = None,
        messages: Messages | None = None,
        token_ids: list[int] | None = None,
        gen: str = "",
        **options: Any,
    ) -> Generator[GenerationEvent, None, None]:
        """Events of one generation as they come; see `GrpcClient.generate`."""
        name, call = self._call(prompt, messages, token_ids, gen, options)
        try:
            for said in call:
                yield event(name, said)
        except grpc.RpcError as error:
            raise failure(error) from None
        finally:
            call.cancel()

    def complete(
        self, prompt: str | None = None, *, token_ids: list[int] | None = None, **options: Any
    ) -> Answer:
        """The whole answer to a prompt, token ids included."""
        options = {"ids": True, **options}
        return gathered(self.generate(prompt=prompt, token_ids=token_ids, **options))

    def chat(self, messages: Messages, **options: Any) -> Answer:
        """The whole answer to a conversation, or to one message."""
        return gathered(self.generate(messages=messages, **{"ids": True, **options}))

    def cancel(self, gen: str) -> None:
        """End a generation by its id, whoever started it; its Finished still comes."""
        try:
            self._stub.Abort(pb.AbortRequest(request_ids=[gen]), metadata=self._metadata)
        except grpc.RpcError as error:
            raise failure(error) from None
