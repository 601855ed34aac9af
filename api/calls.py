"""An HTTP request as route handlers see it, and the table they stand in.

A handler is `async def handle(call: Call) -> None`; modules offer `routes(...) -> list[Route]`.
Bounds on bodies, JSON errors in OpenAI's shape and the watch on the client's going away are here.
Knows ASGI, no route and no model.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, TypeVar
from urllib.parse import parse_qs

import msgspec

from spec_serve.api import messages as m
from spec_serve.api.auth import LOCAL, Principal

T = TypeVar("T")

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Headers = Sequence[tuple[bytes, bytes]]
Access = Literal["open", "key", "admin"]

MAX_BODY = 8 << 20
MAX_COMING = 256 << 20  # of bodies that have begun to arrive, all together
JSON_TYPE, SSE_TYPE = "application/json", "text/event-stream; charset=utf-8"

# HTTP status and OpenAI's error type for each code.
STATUS: dict[str, tuple[int, str]] = {
    "invalid_request": (400, "invalid_request_error"),
    "context_length_exceeded": (400, "invalid_request_error"),
    "model_not_found": (404, "invalid_request_error"),
    "not_found": (404, "invalid_request_error"),
    "method_not_allowed": (405, "invalid_request_error"),
    "too_large": (413, "invalid_request_error"),
    "unauthorized": (401, "invalid_request_error"),
    "forbidden": (403, "permission_error"),
    "rate_limited": (429, "rate_limit_error"),
    "overloaded": (503, "server_error"),
    "draining": (503, "server_error"),
    "timeout": (408, "timeout_error"),
    "duplicate_id": (409, "invalid_request_error"),
    "engine_error": (500, "server_error"),
}


class HttpError(Exception):
    """An answer other than the one asked for. code: a key of STATUS; param: the field."""

    def __init__(
        self, code: str, message: str, param: str | None = None, retry_after_s: int = 0,
        headers: Headers = (),
    ) -> None:  # fmt: skip
        super().__init__(message)
        self.code, self.message, self.param = code, message, param
        self.status, self.type = STATUS.get(code, STATUS["engine_error"])
        self.headers = list(headers)
        if retry_after_s:
            self.headers.append((b"retry-after", str(retry_after_s).encode()))
        if self.status == 401:
            self.headers.append((b"www-authenticate", b"Bearer"))

    @classmethod
    def of(cls, error: m.Error) -> HttpError:
        """The same failure as the other transports tell it (generation.failure makes those)."""
        wait = -(-error.retry_after_ms // 1000)
        return cls(error.code, error.message, error.param, wait)

    def body(self) -> dict[str, Any]:
        """OpenAI's shape."""
        code = {"unauthorized": "invalid_api_key"}.get(self.code, self.code)
        told = {"message": self.message, "type": self.type, "param": self.param, "code": code}
        return {"error": told}


Handler = Callable[["Call"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Route:
    """access: who may call; "open" needs no key. A path ending in "*" matches all below it.

    error: how failures are told here, if not in OpenAI's shape.
    """

    method: Literal["GET", "POST", "DELETE"]
    path: str
    handle: Handler
    access: Access = "key"
    error: Callable[[HttpError], HttpError] | None = None


class Call:
    """One request. `principal` is set before a handler runs; `gone` once the client has left."""

    coming: ClassVar[int] = 0  # bytes held of bodies that are not whole yet

    def __init__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.scope, self._receive, self._send = scope, receive, send
        self.path: str = scope["path"]
        self.method: str = scope["method"]
        self.id = ""  # of the request, in the answer's head and in the log
        self.principal: Principal = LOCAL
        self.started = False  # whether the head of the answer is out
        self.route: Route | None = None
        self.extra: list[tuple[bytes, bytes]] = []  # headers of whatever is answered, such as CORS
        self.gone = asyncio.Event()
        self._watcher: asyncio.Task[None] | None = None

    def header(self, name: str) -> str | None:
        """The first header of this (lower-case) name."""
        wanted = name.encode()
        for key, value in self.scope["headers"]:
            if key == wanted:
                return str(value.decode("latin-1"))
        return None

    def query(self, name: str) -> str | None:
        """The first value of a query parameter."""
        found = parse_qs(self.scope["query_string"].decode("latin-1")).get(name)
        return found[0] if found else None

    def key(self) -> str | None:
        """The API key presented: Authorization: Bearer, or x-api-key."""
        held = self.header("authorization")
        if held is not None:
            scheme, _, key = held.partition(" ")
            return key.strip() if scheme.lower() == "bearer" else None
        return self.header("x-api-key")

    async def body(self) -> bytes:
        """The whole body. HttpError too_large beyond MAX_BODY; ConnectionResetError if cut."""
        length = self.header("content-length")
        if length is not None and length.isdigit() and int(length) > MAX_BODY:
            raise HttpError("too_large", f"a body may have at most {MAX_BODY} bytes")
        held = bytearray()  # not a list: pieces of one byte would cost fifty times their size
        try:
            while True:
                event = await self._receive()
                if event["type"] == "http.disconnect":
                    self.gone.set()
                    raise ConnectionResetError("the client went away")
                part = event.get("body", b"")
                Call.coming += len(part)
                held += part
                if len(held) > MAX_BODY:
                    raise HttpError("too_large", f"a body may have at most {MAX_BODY} bytes")
                if not event.get("more_body"):
                    return bytes(held)
                if Call.coming > MAX_COMING:
                    raise HttpError("overloaded", "too much is being sent at once", retry_after_s=1)
        finally:
            Call.coming -= len(held)

    async def json(self, kind: type[T]) -> T:
        """The body as a msgspec type. HttpError invalid_request naming the field."""
        body = await self.body()
        try:
            return msgspec.json.decode(body, type=kind)
        except RecursionError:
            raise HttpError("invalid_request", "the body is nested too deeply") from None
        except msgspec.ValidationError as error:
            bad = m.bad_message(error)
            raise HttpError("invalid_request", str(bad), bad.field or None) from None
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise HttpError("invalid_request", f"the body is not JSON: {error}") from None

    def watch(self) -> None:
        """From now on notice when the client leaves (sets `gone`); after the body was read."""
        self._watcher = asyncio.create_task(self._watch())

    async def _watch(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        self.gone.set()

    async def close(self) -> None:
        """End the watch; the application calls it when the handler is done."""
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await self._watcher

    async def answer(
        self, status: int, body: bytes, kind: str = JSON_TYPE, headers: Headers = ()
    ) -> None:
        """A whole answer at once."""
        head = [
            (b"content-type", kind.encode()),
            (b"content-length", str(len(body)).encode()),
            *headers,
        ]
        await self._start(status, head)
        shown = b"" if self.method == "HEAD" else body
        await self._send({"type": "http.response.body", "body": shown})

    async def say(self, value: object, status: int = 200, headers: Headers = ()) -> None:
        """A JSON answer that nobody caches."""
        body = msgspec.json.encode(value)
        await self.answer(status, body, headers=((b"cache-control", b"no-store"), *headers))

    async def fail(self, error: HttpError) -> None:
        """Answer with an error; only before anything was sent."""
        if self.route is not None and self.route.error is not None:
            error = self.route.error(error)
        await self.say(error.body(), error.status, error.headers)

    async def stream(self, kind: str = SSE_TYPE, headers: Headers = ()) -> None:
        """Begin an answer of unknown length; then `chunk`, `end`."""
        head = [
            (b"content-type", kind.encode()),
            (b"cache-control", b"no-cache"),
            (b"x-accel-buffering", b"no"),
            *headers,
        ]
        await self._start(200, head)

    async def chunk(self, data: bytes) -> None:
        """A piece of a stream. Raises OSError once the client is gone, sooner or later."""
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def end(self) -> None:
        """The end of a stream. A stream left without it is cut, as the client can tell."""
        await self._send({"type": "http.response.body", "body": b""})

    def cut(self) -> None:
        """Drop the connection: the client does not read, so it can't be told either."""
        self.gone.set()
        # ASGI has no word for this; uvicorn's `send` is a method of what holds the transport.
        transport = getattr(getattr(self._send, "__self__", None), "transport", None)
        if transport is not None:
            transport.abort()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.started = True
        headers += [(b"x-request-id", self.id.encode()), *self.extra]
        await self._send({"type": "http.response.start", "status": status, "headers": headers})
