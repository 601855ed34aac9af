"""The HTTP side as one raw ASGI application: liveness, readiness, version, and the WebSocket route.

Routes are a plain table, so that more of them are more lines. Knows the service, no models.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import msgspec

from spec_serve.api.service import Service
from spec_serve.api.version import __version__
from spec_serve.api.websocket import Receive, Scope, Send, Socket, stream

log = logging.getLogger("spec_serve.http")

Answer = tuple[int, dict[str, object]]
STREAM_PATH = "/v1/stream"


class App:
    """ASGI 3 application. `sessions`: the open WebSockets, for draining."""

    def __init__(self, service: Service, allow_origins: tuple[str, ...] = ()) -> None:
        self.sessions: set[Socket] = set()
        self._service, self._allow_origins = service, allow_origins
        self._routes: dict[str, Callable[[], Answer]] = {
            "/": self._index,
            "/health": self._health,
            "/ready": self._ready,
            "/version": self._version,
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self._serve(scope, receive, send)
        except OSError:
            pass  # the client is gone
        except Exception:
            # Said here, as uvicorn's own log is off: it has a traceback for every odd client.
            log.exception("an HTTP request or WebSocket failed")

    async def _serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._answer(scope, send)
        elif scope["path"] == STREAM_PATH:
            await stream(self._service, self.sessions, self._allow_origins, scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    async def _answer(self, scope: Scope, send: Send) -> None:
        route = self._routes.get(scope["path"])
        extra: list[tuple[bytes, bytes]] = []
        if route is None:
            status, said = 404, {"error": {"message": "no such path", "code": "not_found"}}
            if scope["path"] == STREAM_PATH:
                status = 426
                said = {"error": {"message": "this is a WebSocket", "code": "upgrade_required"}}
                extra = [(b"upgrade", b"websocket")]
        elif scope["method"] not in ("GET", "HEAD"):
            status, said = 405, {"error": {"message": "only GET", "code": "method_not_allowed"}}
            extra = [(b"allow", b"GET, HEAD")]
        else:
            status, found = route()
            said = found  # type: ignore[assignment]
        body = msgspec.json.encode(said)
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"cache-control", b"no-store"),
            *extra,
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send(
            {"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body}
        )

    def _index(self) -> Answer:
        """What a browser finds at the server's address."""
        names = {"websocket": STREAM_PATH, "health": "/health", "ready": "/ready"}
        return 200, {"name": "spec-serve", "version": __version__, **names}

    def _health(self) -> Answer:
        alive = self._service.link.alive
        return (200 if alive else 503), {"status": "ok" if alive else "engine stopped"}

    def _ready(self) -> Answer:
        service = self._service
        if service.ready:
            return 200, {"status": "ready", "model": service.model}
        return 503, {"status": "draining" if service.draining else "not ready"}

    def _version(self) -> Answer:
        return 200, {"version": __version__}
