"""Who may open a WebSocket: the check of a handshake, the same for every implementation.

A page's origin, the subprotocol, the key and whether the server takes requests at all. Knows the
headers of a handshake, no sockets; the `Door` also knows which ones are open, for draining.
"""

from __future__ import annotations

import base64
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from spec_serve.api import messages as m
from spec_serve.api.auth import OPEN, Keys, Principal
from spec_serve.api.service import Service
from spec_serve.spec.request import RequestError

if TYPE_CHECKING:
    from spec_serve.api.websocket import Socket

Headers = Sequence[tuple[bytes, bytes]]

KEY_PROTOCOL = "specserve.key."  # and the key, as base64url


@dataclass(frozen=True, slots=True)
class Entry:
    """A handshake that is let in. principal None: the key has to come as the first message.

    subprotocol: what the answer names, None for a client that offered none. trace: the client's
    traceparent.
    """

    codec: str
    subprotocol: str | None
    principal: Principal | None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class Refusal:
    """A handshake answered with an HTTP error."""

    status: int
    said: str
    headers: Headers = field(default=())


def origin_allowed(origin: str | None, host: str, allowed: tuple[str, ...]) -> bool:
    """Whether a page from `origin` may connect; programs send no origin and may.

    Without this any web page could drive a server on its reader's machine. A page of the server's
    own counts only under an address or "localhost": behind another name may stand a foreign page
    whose name was made to point here (DNS rebinding); such names belong into `allowed`.
    """
    if origin is None or "*" in allowed or origin in allowed:
        return True
    try:
        if not host or urlsplit(origin).netloc.lower() != host.lower():
            return False
        name = urlsplit(f"//{host}").hostname or ""
    except ValueError:  # no address at all
        return False
    if name == "localhost":
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def header(headers: Headers, name: bytes) -> str | None:
    """The first header of this (lower-case) name."""
    for key, value in headers:
        if key == name:
            return value.decode("latin-1")
    return None


def offered(headers: Headers) -> list[str]:
    """The subprotocols a client names, of all its headers."""
    values = [v.decode("latin-1") for k, v in headers if k == b"sec-websocket-protocol"]
    return [name for value in values for part in value.split(",") if (name := part.strip())]


class Door:
    """Lets clients in. sockets: the open ones. origins: of pages that may connect besides our own.

    `path`: where the WebSocket stands.
    """

    def __init__(
        self, service: Service, path: str, origins: tuple[str, ...] = (), keys: Keys = OPEN
    ) -> None:
        self.service, self.path, self.keys = service, path, keys
        self.sockets: set[Socket] = set()
        self._origins = origins

    def enter(self, headers: Headers) -> Entry | Refusal:
        """Whether this handshake is let in; headers have lower-case names."""
        origin, host = header(headers, b"origin"), header(headers, b"host") or ""
        try:
            allowed = origin_allowed(origin, host, self._origins)
        except ValueError:  # not a URL at all
            allowed = False
        if not allowed:
            return Refusal(403, "pages of this origin may not connect")
        names = offered(headers)
        try:
            principal = self._principal(headers, names)
        except RequestError as error:
            return Refusal(401, str(error), ((b"www-authenticate", b"Bearer"),))
        spoken = next((name for name in names if name in m.SUBPROTOCOLS), None)
        if spoken is None and names:
            return Refusal(400, f"subprotocols: {', '.join(m.SUBPROTOCOLS)}")
        if not self.service.ready:
            told, after = "the engine is not ready", b"1"
            if self.service.draining:
                told, after = "the server is shutting down", b"5"
            return Refusal(503, told, ((b"retry-after", after),))
        return Entry(spoken or m.JSON, spoken, principal, header(headers, b"traceparent"))

    def _principal(self, headers: Headers, names: list[str]) -> Principal | None:
        """Whose key came along; None if one is needed and none came. Raises RequestError."""
        presented: str | None = None
        held = header(headers, b"authorization")
        if held is not None:
            scheme, _, key = held.partition(" ")
            presented = key.strip() if scheme.lower() == "bearer" else ""
        elif (plain := header(headers, b"x-api-key")) is not None:
            presented = plain
        for name in names:
            if name.startswith(KEY_PROTOCOL):
                presented = _unwrapped(name.removeprefix(KEY_PROTOCOL))
        if presented is None and self.keys.needed:
            return None
        return self.keys.check(presented)


def _unwrapped(key: str) -> str:
    """A key from its base64url form; "" if it is none, which no key equals."""
    try:
        return base64.urlsafe_b64decode(key + "=" * (-len(key) % 4)).decode()
    except ValueError:
        return ""
