"""The server: one event loop with HTTP, WebSocket and gRPC, the engine in its own thread beside it.

Owns start, signals and shutdown: the first SIGTERM or SIGINT drains, the second ends at once.
What requests mean is the service's business, how they look that of the transports.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import signal
import socket
import ssl
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import uvicorn
import uvloop

from spec_serve.api import (
    anthropic,
    openai_chat,
    openai_completions,
    openai_models,
    openapi,
    program_routes,
    tls,
)
from spec_serve.api.adapt_traffic import TrafficKeeper
from spec_serve.api.auth import configured
from spec_serve.api.calls import Route
from spec_serve.api.convert import TextTokens, read_generation_config, sampling_defaults
from spec_serve.api.engine_thread import EngineThread
from spec_serve.api.grpc_server import GrpcServer
from spec_serve.api.http import STREAM_PATH, App
from spec_serve.api.http_limits import BoundedHttp
from spec_serve.api.kv_events import Publisher
from spec_serve.api.kv_feed import Feed
from spec_serve.api.limits import Bounds
from spec_serve.api.link import Runs
from spec_serve.api.messages import Draining
from spec_serve.api.metrics import Meter
from spec_serve.api.ops import Operations
from spec_serve.api.ports import is_loopback
from spec_serve.api.process_child import EngineProcess
from spec_serve.api.process_link import link_to
from spec_serve.api.programs import registered
from spec_serve.api.request_log import RequestLog
from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.service import Service
from spec_serve.api.traces import Traces, exporter
from spec_serve.api.web import page
from spec_serve.api.websocket import RESTART

log = logging.getLogger("spec_serve.server")

MAX_FRAME = 8 << 20
FLUSH_S = 3.0  # for sending what cancelled generations still have to say
HEARD_S = 1.0  # for a request to come over a connection that has had none when the port closes
CLOSE_S = 5.0  # for the HTTP side to end once its sockets are closed


class HttpServer(uvicorn.Server):
    """uvicorn without its signal handling: it would raise the signal again before we drain."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def run_server(
    engine: Runs | EngineProcess,
    tokenizer: TextTokens,
    settings: ServeSettings,
    ready: Callable[[list[str]], None],
    thread: EngineThread | None = None,
) -> int:
    """Serve in a loop of its own until a signal; the exit code. See `serve`."""
    return uvloop.run(serve(engine, tokenizer, settings, ready, thread))


async def serve(
    engine: Runs | EngineProcess,
    tokenizer: TextTokens,
    settings: ServeSettings,
    ready: Callable[[list[str]], None],
    thread: EngineThread | None = None,
) -> int:
    """Serve until a signal or the engine's end.

    ready: told the addresses once all listen. thread: where the engine was loaded and shall step.

    Returns 0 after a drain, 1 when a second signal cut it short or the engine failed. Raises
    OSError naming the setting when a port can't be had, ValueError for a bad setting.
    """
    server = Server(engine, tokenizer, settings, thread)
    try:
        await server.start()
        ready(server.addresses())
        return await server.until_stopped()
    finally:
        await server.close()


class Server:
    """Everything that listens, and the order in which it begins and ends."""

    def __init__(
        self,
        engine: Runs | EngineProcess,
        tokenizer: TextTokens,
        settings: ServeSettings,
        thread: EngineThread | None = None,
    ) -> None:
        self.settings = settings
        self.link = link_to(engine, self._engine_died, thread, settings.engine_hang_s)
        config = settings.generation_config
        if config is None:
            config = _find_generation_config(engine.info.model)
        self.keys = configured(settings)
        self._tls = tls.context(settings)
        self.service = Service(
            self.link, tokenizer, settings.model_name, sampling_defaults(config), _bounds(settings)
        )
        meter = Meter()
        self.traces: Traces | None = None
        self.link.observers += [meter.observe, RequestLog().observe]
        if settings.otel_endpoint:
            self.traces = Traces(exporter(settings.otel_endpoint), self.service.model)
            self.link.observers.append(self.traces.observe)
        self._keeper: TrafficKeeper | None = None
        if settings.adapt_folder:
            most = settings.adapt_mib << 20
            self._keeper = TrafficKeeper(Path(settings.adapt_folder), most, settings.adapt_salted)
            self.link.observers.append(self._keeper.observe)
        self.feed = Feed() if settings.kv_events else None
        self._publisher = Publisher(self.feed, settings) if self.feed is not None else None
        if self.feed is not None:
            self.link.cache_observers.append(self.feed.take)
        self.operations = Operations(self.service, meter, settings.metrics_compat)
        self.service.shelf.window_s = settings.resume_window_s
        self.service.keys = self.keys
        self.service.programs = registered(settings.programs, settings.program_functions)
        self.app = App(self.service, settings.allow_origins, self.keys, self._routes())
        self.app.add(openapi.routes(self.app.routes))
        self.port = settings.port
        self.grpc: GrpcServer | None = None
        self._http: HttpServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self._asked = asyncio.Event()  # to drain
        self._at_once = asyncio.Event()
        self._failed = False

    def _routes(self) -> list[Route]:
        """What HTTP offers besides the App's own; a module each."""
        return [
            *self.operations.routes(),
            *page.routes(self.settings),
            *openai_chat.routes(self.service),
            *openai_completions.routes(self.service),
            *openai_models.routes(self.service),
            *anthropic.routes(self.service),
            *program_routes.routes(self.service),
        ]

    def addresses(self) -> list[str]:
        """What to open: the WebSocket, gRPC and health addresses."""
        host = self.settings.host
        if host in ("0.0.0.0", "::", ""):
            host = "localhost"
        elif ":" in host:
            host = f"[{host}]"
        safe = "s" if self._tls is not None else ""
        where = f"{host}:{self.port}"
        found = [f"ws{safe}://{where}{STREAM_PATH}", f"http{safe}://{where}/health"]
        if self.grpc is not None:
            found.insert(1, f"grpc{safe}://{host}:{self.grpc.port}")
        return found

    async def start(self) -> None:
        """Take the ports, start the engine, then listen."""
        settings = self.settings
        bound = _listen(settings.host, settings.port)
        self.port = bound.getsockname()[1]
        try:
            if settings.grpc_port is not None:
                if settings.grpc_port == self.port:
                    raise ValueError(f"grpc-port: {self.port} is the HTTP port already")
                credentials = tls.grpc_credentials(settings)
                self.grpc = GrpcServer(
                    self.service, settings, self.keys, credentials, self.feed
                )
            self._http = HttpServer(_uvicorn_config(self.app, settings, self._tls))
            if self._publisher is not None:
                self._publisher.start()
        except BaseException:
            bound.close()
            raise
        if not is_loopback(settings.host):
            if settings.anonymous:
                log.warning("%s: whoever reaches these ports may use them", settings.host)
            elif self._tls is None:
                log.warning("%s: keys and texts go unencrypted, there is no TLS", settings.host)
        self.link.start()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            # In a thread other than the main one there are no signals to handle.
            with contextlib.suppress(ValueError, RuntimeError):
                loop.add_signal_handler(number, self.stop)
        with contextlib.suppress(ValueError, RuntimeError, AttributeError):  # Windows has no HUP
            loop.add_signal_handler(signal.SIGHUP, self.reread)
        self._serving = asyncio.create_task(self._http.serve(sockets=[bound]))
        while not self._http.started:
            if self._serving.done():
                self._serving.result()
                raise OSError(f"port: can't listen on {settings.host}:{settings.port}")
            await asyncio.sleep(0.005)
        if self.grpc is not None:
            await self.grpc.start()

    def stop(self) -> None:
        """What a signal does: drain; the second time, end at once."""
        if self._asked.is_set():
            log.warning("ending at once")
            self._at_once.set()
        else:
            self._asked.set()

    def reread(self) -> None:
        """What SIGHUP does: read the file of keys and the certificate again.

        A file that won't do leaves what is in force. gRPC keeps its certificate.
        """
        try:
            log.info("%d keys are in force", self.keys.reread())
            self._revoke()
            if self._tls is not None:
                tls.load(self._tls, self.settings)
        except (ValueError, OSError) as error:
            log.error("not read again: %s", error)

    def _revoke(self) -> None:
        """Cancel and close what keys have opened that are no longer in force."""
        self.service.revoke()
        for session in self._sessions():
            if session.principal is not None and not self.keys.knows(session.principal):
                session.revoke()

    def _engine_died(self) -> None:
        self._failed = True
        self._asked.set()
        self._at_once.set()

    async def until_stopped(self) -> int:
        """Wait for a signal, then drain. The exit code."""
        await self._asked.wait()
        service, settings = self.service, self.settings
        if not self._failed:
            log.info("draining: up to %g s for what runs", settings.drain_s)
        service.draining = True
        if self.grpc is not None:
            await self.grpc.not_serving()
        self.link.drain()
        for session in self._sessions():
            session.say(Draining(settings.drain_s))
        await self._quiet(settings.drain_s, self._at_once)
        cut = self._at_once.is_set()
        if not self._idle():
            for session in self._sessions():
                session.cancel_all()
            self.link.cancel_all()
            await self._quiet(FLUSH_S, None)
        return 1 if self._failed or cut else 0

    def _idle(self) -> bool:
        calls = self.grpc.calls if self.grpc is not None else 0
        calls += self.app.calls
        return self.link.idle() and not calls and not any(s.busy for s in self._sessions())

    def _sessions(self) -> list[Any]:
        """WebSockets and gRPC's sessions."""
        return [*self.app.sessions, *(self.grpc.sessions if self.grpc is not None else ())]

    async def _quiet(self, within_s: float, unless: asyncio.Event | None) -> None:
        """Wait until nothing runs and all has been sent, at most so long."""
        end = asyncio.get_running_loop().time() + within_s
        while not self._idle() and asyncio.get_running_loop().time() < end:
            if unless is not None and unless.is_set():
                return
            await asyncio.sleep(0.02)

    async def _close_the_door(self) -> None:
        """Take no more HTTP connections, and answer those that the kernel took for us.

        Who connected just before would else see the socket close without a word, which tells no
        client whether to try again; as we drain they are told so (503).
        """
        if self._http is None or not self._http.started:
            return
        for _ in range(2):  # the loop accepts all that wait before it comes back here
            await asyncio.sleep(0)
        for server in self._http.servers:
            server.close()
        await asyncio.sleep(0.02)  # until the last of them are known
        open_ones = self._http.server_state.connections
        await _within(HEARD_S, lambda: not any(getattr(c, "unheard", False) for c in open_ones))

    async def close(self) -> None:
        """Close what is open, in the order that lets everybody be told."""
        self.service.draining = True
        await self._close_the_door()
        for session in self.app.sessions:
            session.close(RESTART)
        if self.grpc is not None:
            await self.grpc.stop(0.5)
        if self._http is not None and self._serving is not None:
            await _within(1.0, lambda: not self.app.sessions)  # the close frames first
            # Who does not read never sees a close frame, and would keep its socket open for ever.
            for connection in list(self._http.server_state.connections):
                transport = getattr(connection, "transport", None)
                if transport is not None:
                    transport.abort()
            self._http.should_exit = True
            await asyncio.wait({self._serving}, timeout=CLOSE_S)
            self._serving.cancel()
        if not await self.link.stop():
            log.error("the engine is still in its last step")
        self.service.close()
        if self._keeper is not None:
            self._keeper.close()
        if self._publisher is not None:
            self._publisher.close()
        if self.traces is not None:
            self.traces.close()
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT, getattr(signal, "SIGHUP", signal.SIGINT)):
            with contextlib.suppress(ValueError, RuntimeError):
                loop.remove_signal_handler(number)


async def _within(most_s: float, true: Callable[[], bool]) -> None:
    """Wait until something is true, at most so long."""
    end = asyncio.get_running_loop().time() + most_s
    while not true() and asyncio.get_running_loop().time() < end:
        await asyncio.sleep(0.02)


def _uvicorn_config(
    app: App, settings: ServeSettings, context: ssl.SSLContext | None
) -> uvicorn.Config:
    if settings.ws_impl == "picows":
        from spec_serve.api.picows_bridge import bridge

        implementation: Any = bridge(app.door)
    elif settings.ws_impl == "websockets":
        implementation = "websockets-sansio"
    else:
        raise ValueError(f"ws-impl: must be picows or websockets, not {settings.ws_impl!r}")
    return uvicorn.Config(
        app,
        loop="none",
        http=BoundedHttp,
        ws=implementation,
        ws_max_size=MAX_FRAME,
        ws_ping_interval=20.0,
        ws_ping_timeout=20.0,
        ws_per_message_deflate=False,
        lifespan="off",
        log_config=None,
        log_level="critical",
        access_log=False,
        server_header=False,
        date_header=False,
        timeout_graceful_shutdown=2,
        ssl_context_factory=None if context is None else lambda config, default: context,
    )


def _listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address, so that the error names it and port 0 is known at once."""
    family = socket.AF_INET
    with contextlib.suppress(ValueError):
        if ipaddress.ip_address(host).version == 6:
            family = socket.AF_INET6
    made = socket.socket(family, socket.SOCK_STREAM)
    made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        made.bind((host, port))
    except (OSError, OverflowError) as error:
        made.close()
        raise OSError(f"port: can't listen on {host}:{port}: {error}") from error
    made.setblocking(False)
    return made


def _bounds(settings: ServeSettings) -> Bounds:
    return Bounds(
        queue=settings.max_queue,
        queue_tokens=settings.max_queue_tokens,
        first_token_s=settings.first_token_timeout_s,
        total_s=settings.total_timeout_s,
        parallel=settings.key_parallel,
        requests=settings.key_requests_per_minute,
        tokens=settings.key_tokens_per_minute,
    )


def _find_generation_config(model: str) -> Mapping[str, Any]:
    """Beside the model that was just loaded, so that nothing is fetched; {} for a GGUF file."""
    path = Path(model)
    if not path.exists():
        from spec_serve.target.hub import resolve

        try:
            path = resolve(model, progress=False)
        except (ValueError, OSError):
            return {}
    return read_generation_config(path)
