"""The HTTP side as one raw ASGI application: a table of routes, keys asked for at its one door.

Whatever is not in the table is refused; whatever does not say "open" needs a key. Every answer
carries a request id that the log knows. Knows the service and routes, no models.
"""

from __future__ import annotations

import logging
import re
import secrets
from collections.abc import Iterable

from spec_serve.api import traces
from spec_serve.api.auth import OPEN, Keys
from spec_serve.api.calls import Call, HttpError, Receive, Route, Scope, Send
from spec_serve.api.generation import failure
from spec_serve.api.service import Service
from spec_serve.api.version import __version__
from spec_serve.api.websocket import Socket, stream
from spec_serve.api.websocket_door import Door, origin_allowed
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.http")

STREAM_PATH = "/v1/stream"
_CORS_HEADERS = b"authorization, content-type, x-api-key, x-request-id, traceparent"
_ID = re.compile(r"[A-Za-z0-9_.:-]{1,64}")


class App:
    """ASGI 3 application. `sessions`: the open WebSockets, for draining.

    `calls`: HTTP requests being served. routes: besides liveness, readiness and version.
    """

    def __init__(
        self,
        service: Service,
        allow_origins: tuple[str, ...] = (),
        keys: Keys = OPEN,
        routes: Iterable[Route] = (),
    ) -> None:
        self.door = Door(service, STREAM_PATH, allow_origins, keys)
        self.sessions: set[Socket] = self.door.sockets
        self.calls = 0
        self._service, self._allow_origins, self._keys = service, allow_origins, keys
        self._exact: dict[str, dict[str, Route]] = {}
        self._below: list[tuple[str, dict[str, Route]]] = []
        self.add(
            [
                Route("GET", "/", self._index, "open"),
                Route("GET", "/health", self._health, "open"),
                Route("GET", "/ready", self._ready, "open"),
                Route("GET", "/version", self._version),
            ]
        )
        self.add(routes)

    def add(self, routes: Iterable[Route]) -> None:
        """Further routes; a later one replaces an earlier one of the same path and method."""
        for route in routes:
            if route.path.endswith("*"):
                prefix = route.path[:-1]
                methods = next((held for path, held in self._below if path == prefix), None)
                if methods is None:
                    methods = {}
                    self._below.append((prefix, methods))
            else:
                methods = self._exact.setdefault(route.path, {})
            methods[route.method] = route

    def routes(self) -> list[Route]:
        """All there are."""
        tables = [*self._exact.values(), *(methods for _, methods in self._below)]
        return [route for methods in tables for route in methods.values()]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            if scope["type"] == "http":
                await self._serve(Call(scope, receive, send))
            elif scope["path"] == STREAM_PATH:
                await stream(self.door, scope, receive, send)
            else:
                await send({"type": "websocket.close", "code": 1008})
        except OSError:
            pass  # the client is gone
        except Exception:
            # Said here, as uvicorn's own log is off: it has a traceback for every odd client.
            log.exception("an HTTP request or WebSocket failed")

    async def _serve(self, call: Call) -> None:
        given = call.header("x-request-id") or ""
        call.id = given if _ID.fullmatch(given) else secrets.token_hex(8)
        traces.caller.set(call.header("traceparent"))
        self.calls += 1
        try:
            if self._preflight(call):
                return await call.answer(204, b"")
            route = call.route = self._find(call)
            if route.access != "open":
                self._from_allowed_page(call)
            if route.access == "key":
                call.principal = self._keys.check(call.key())
            elif route.access == "admin":
                call.principal = self._keys.check_admin(call.key())
            await route.handle(call)
        except HttpError as error:
            await self._failed(call, error)
        except RequestError as error:
            await self._failed(call, HttpError.of(failure(error)))
        except ConnectionError:
            pass  # the client is gone
        except Exception:
            log.exception("%s %s failed, request %s", call.method, call.path[:200], call.id)
            told = f"the request failed in the server; its log says more under {call.id}"
            await self._failed(call, HttpError("engine_error", told))
        finally:
            self.calls -= 1
            await call.close()

    def _preflight(self, call: Call) -> bool:
        """Whether a browser asks what a foreign page may do, and that page is allowed.

        Only pages of `allow_origins` learn what other answers say; by default none do.
        """
        origin = call.header("origin")
        if origin is None or not ("*" in self._allow_origins or origin in self._allow_origins):
            return False
        call.extra += [
            (b"access-control-allow-origin", origin.encode("latin-1")),
            (b"access-control-expose-headers", b"x-request-id, retry-after"),
            (b"vary", b"origin"),
        ]
        if call.method != "OPTIONS" or call.header("access-control-request-method") is None:
            return False
        call.extra += [
            (b"access-control-allow-methods", b"GET, POST, DELETE"),
            (b"access-control-allow-headers", _CORS_HEADERS),
            (b"access-control-max-age", b"600"),
        ]
        return True

    def _from_allowed_page(self, call: Call) -> None:
        """Without keys any page that a user of this machine opens could ask for things."""
        origin, host = call.header("origin"), call.header("host") or ""
        if not self._keys.needed and not origin_allowed(origin, host, self._allow_origins):
            raise HttpError("forbidden", "pages of this origin may not use this server")

    async def _failed(self, call: Call, error: HttpError) -> None:
        if not call.started:  # else the stream stays without an end, which its reader can tell
            await call.fail(error)

    def _find(self, call: Call) -> Route:
        path = call.path
        if path == STREAM_PATH:
            error = HttpError(
                "not_found", "this is a WebSocket", headers=[(b"upgrade", b"websocket")]
            )
            error.status = 426
            raise error
        methods = self._exact.get(path)
        if methods is None:
            methods = next((held for start, held in self._below if path.startswith(start)), None)
        if methods is None:
            raise HttpError("not_found", "no such path")
        route = methods.get("GET" if call.method == "HEAD" else call.method)
        if route is None:
            allowed = ", ".join([*methods, "HEAD"] if "GET" in methods else methods)
            headers = [(b"allow", allowed.encode())]
            raise HttpError("method_not_allowed", f"only {allowed}", headers=headers)
        return route

    async def _index(self, call: Call) -> None:
        """What a browser finds at the server's address."""
        names = {"websocket": STREAM_PATH, "health": "/health", "ready": "/ready"}
        await call.say({"name": "spec-serve", "version": __version__, **names})

    async def _health(self, call: Call) -> None:
        link = self._service.link
        status = "ok" if link.alive else "restarting" if link.restarting else "engine stopped"
        # A server that starts its engine anew needs no one to start it anew.
        await call.say({"status": status}, 503 if status == "engine stopped" else 200)

    async def _ready(self, call: Call) -> None:
        service = self._service
        if service.ready:
            await call.say({"status": "ready", "model": service.model})
        else:
            await call.say({"status": "draining" if service.draining else "not ready"}, 503)

    async def _version(self, call: Call) -> None:
        await call.say({"version": __version__})
