"""The gRPC side: grpc.aio in the one event loop, with health, reflection and rich errors.

A cancelled call or a passed deadline ends its generation in the engine. Knows calls; what requests
mean stands in grpc_convert.py and behind the service.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
from google.protobuf.runtime_version import VersionError
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from spec_serve.api import grpc_convert as convert
from spec_serve.api import messages as m
from spec_serve.api.auth import OPEN, Keys
from spec_serve.api.grpc_call import Calls, Said, abort, bad, generate, refuse
from spec_serve.api.grpc_guard import Guard, caller
from spec_serve.api.grpc_session import SessionCall
from spec_serve.api.grpc_stats import samples, server_stats
from spec_serve.api.kv_feed import Feed
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.service import Service, shown_name
from spec_serve.api.session import REVOKED
from spec_serve.api.text import TextStream
from spec_serve.api.version import __version__
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.grpc")

_WHY_NOT = ""  # vLLM's interface is not offered
try:
    from spec_serve.api import vllm_grpc
except ImportError as error:  # its messages are an extra
    if (error.name or "").partition(".")[0] != "smg_grpc_proto":
        raise
    vllm_grpc = None  # type: ignore[assignment]
except (RuntimeError, VersionError) as error:  # made for other versions of gRPC or protobuf
    vllm_grpc, _WHY_NOT = None, str(error)  # type: ignore[assignment]

SERVICES = (
    pb.DESCRIPTOR.services_by_name["SpecServe"],
    health_pb2.DESCRIPTOR.services_by_name["Health"],
    *([vllm_grpc.SERVICE] if vllm_grpc is not None else ()),
)
MAX_MESSAGE = 8 << 20
FOLLOW_S = 0.5  # between looks at whether the engine is there
OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE),
    # Clients may ping through a long silent prefill without being told to go away.
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.keepalive_time_ms", 20_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    ("grpc.so_reuseport", 0),
)


class SpecServe(pb_grpc.SpecServeServicer):
    """The methods of the proto, for one service."""

    def __init__(self, service: Service, calls: Calls) -> None:
        self._service = service
        self.calls = calls
        self.sessions: set[SessionCall] = set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """Stream one generation. One task per call; the engine's events go into its outbox."""
        try:
            wire = convert.generate(request)
        except m.BadMessage as error:
            await abort(context, bad(error))
        usual = pb.GenerateEvent()
        reused = convert.Reused(usual)
        write = context.write

        async def say(message: Said) -> None:
            # The usual one is encoded before `write` waits, so that it is free again.
            if type(message) is m.Delta and reused.fill(message):
                await write(usual)
            else:
                await write(convert.event(message))

        await generate(self._service, self.calls, context, wire, request.request_id, say)

    async def Session(self, requests: AsyncIterator[pb.SessionRequest], context: Any) -> None:
        """Many generations over one call, as on a WebSocket."""
        if self._service.draining:
            await refuse(context, RequestError("", "the server is shutting down", "draining"))
        session = SessionCall(self._service, caller.get(), context)
        self.sessions.add(session)
        try:
            await session.serve(requests)
        finally:
            self.sessions.discard(session)

    async def Abort(self, request: pb.AbortRequest, context: Any) -> pb.AbortResponse:
        """Cancel by id what this key has started; other ids are left out of the answer."""
        return pb.AbortResponse(aborted=self._service.abort(request.request_ids, caller.get()))

    async def Tokenize(self, request: pb.TokenizeRequest, context: Any) -> pb.TokenizeResponse:
        """Text or chat to ids, or ids to text; ids as a generation would begin with."""
        service, table = self._service, self._service.tokenizer
        limit = service.link.info.vocab_size
        if request.WhichOneof("input") == "detokenize":
            ids = list(request.detokenize.ids)
        else:
            try:
                values = {"gen": "call", "model": request.model, **convert.inputs(request)}
                wire = m.generate(values)
            except m.BadMessage as error:
                await abort(context, bad(error))
            try:
                prepared = await service.prepare(wire, principal=caller.get())
                ids = prepared.request.prompt
            except RequestError as error:
                await refuse(context, error, wire)
        for token in ids:
            if token >= limit:
                told = f"token id {token} is not in the vocabulary (0 to {limit - 1})"
                await refuse(context, RequestError("detokenize.ids", told))
        text = TextStream(table, skip_special=False)
        return pb.TokenizeResponse(ids=ids, text=text.push(ids) + text.finish())

    async def ListModels(
        self, request: pb.ListModelsRequest, context: Any
    ) -> pb.ListModelsResponse:
        """The one model that is served."""
        return pb.ListModelsResponse(models=[self._model()])

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.ServerInfo:
        """What runs, and the engine's counters."""
        service = self._service
        return pb.ServerInfo(
            version=__version__,
            uptime_s=time.monotonic() - service.started,
            models=[self._model()],
            max_running=service.link.info.max_rows,
            draining=service.draining,
            stats=server_stats(service.link.stats()),
        )

    async def WatchStats(self, request: pb.WatchStatsRequest, context: Any) -> None:
        """The counters and their rates, one sample per interval until the client leaves."""
        try:
            async for made in samples(self._service, request.interval_ms):
                if not self._service.keys.knows(caller.get()):
                    await abort(context, REVOKED)
                await context.write(made)
        except m.BadMessage as error:
            await abort(context, bad(error))

    def _model(self) -> pb.Model:
        info = self._service.link.info
        return pb.Model(
            id=self._service.model,
            target=shown_name(info.model),
            draft=shown_name(info.draft),
            max_context=info.max_context,
            vocab_size=info.vocab_size,
            dtype=info.dtype,
            device=info.device,
            max_nodes=info.max_nodes,
            sources=info.sources,
        )


class GrpcServer:
    """A server bound to the settings' address; `port` is the real one. OSError if it is taken.

    keys: what callers must present. credentials: TLS; None = none. feed: of the prefix cache's
    changes, for gateways; None = not told.
    """

    def __init__(
        self,
        service: Service,
        settings: ServeSettings,
        keys: Keys = OPEN,
        credentials: grpc.ServerCredentials | None = None,
        feed: Feed | None = None,
    ) -> None:
        host, port = settings.host, settings.grpc_port
        self._service, self._calls = service, Calls()
        self._following: asyncio.Task[None] | None = None
        self.servicer = SpecServe(service, self._calls)
        self._server = grpc.aio.server(interceptors=[Guard(keys)], options=OPTIONS)
        self._health = HealthServicer()
        add = pb_grpc.add_SpecServeServicer_to_server
        add(self.servicer, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if vllm_grpc is not None:
            vllm_grpc.register(service, self._calls, self._server, feed)
        elif _WHY_NOT:
            log.warning("vLLM's gRPC interface is not offered: %s", _WHY_NOT)
        names = [described.full_name for described in SERVICES]
        if settings.reflection:
            reflection.enable_server_reflection((*names, reflection.SERVICE_NAME), self._server)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(where)
            else:
                self.port = self._server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise OSError(f"grpc-port: can't listen on {where}") from error
        if not self.port:
            raise OSError(f"grpc-port: can't listen on {where}")

    @property
    def sessions(self) -> frozenset[SessionCall]:
        """The open ones."""
        return frozenset(self.servicer.sessions)

    @property
    def calls(self) -> int:
        """How many calls are being served, besides sessions."""
        return self._calls.count

    async def start(self) -> None:
        """Serve, and say so."""
        await self._server.start()
        await self._tell(True)
        self._following = asyncio.create_task(self._follow())

    async def _tell(self, serving: bool) -> None:
        status = health_pb2.HealthCheckResponse
        for name in ("", *(described.full_name for described in SERVICES)):
            await self._health.set(name, status.SERVING if serving else status.NOT_SERVING)

    async def _follow(self) -> None:
        """Health says whether there is an engine: one in a process of its own may restart."""
        told = True
        while True:
            await asyncio.sleep(FOLLOW_S)
            if self._service.ready != told:
                told = self._service.ready
                await self._tell(told)

    async def not_serving(self) -> None:
        """Tell health watchers that this server is going away."""
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """No new calls; running ones have grace_s seconds. Sessions are told to end."""
        if self._following is not None:
            self._following.cancel()
        for session in self.servicer.sessions:
            session.close()
        await self._server.stop(grace_s)
