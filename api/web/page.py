"""Serves the chat page at `/` and the files it is made of, read once from the package.

Files stand below an address that holds a digest of all of them, so that browsers may keep them for
ever and never mix two versions. Nothing is built and nothing is fetched from elsewhere. What the
page does is in `static/`; this module knows files, types and headers.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from importlib.resources.abc import Traversable

from spec_serve.api.calls import Call, HttpError, Route
from spec_serve.api.server_settings import ServeSettings

TYPES = {
    "html": "text/html; charset=utf-8",
    "css": "text/css; charset=utf-8",
    "js": "text/javascript; charset=utf-8",
    "svg": "image/svg+xml",
    "": "text/plain; charset=utf-8",
}
# Trusted types: text can become HTML only through the sanitiser, whatever a module tries.
POLICY = "; ".join(
    (
        "default-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "style-src 'self'",
        "object-src 'none'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types dompurify",
    )
)
GUARDS = (
    (b"content-security-policy", POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)
PREFIX = "/assets/"
FOREVER, ALWAYS_ASK = b"public, max-age=31536000, immutable", b"no-cache"


class Page:
    """The page in memory. files: all but the page itself. digest: of everything, in addresses."""

    def __init__(self) -> None:
        found = dict(_read(files("spec_serve.api.web") / "static", ""))
        whole = hashlib.sha256()
        for name in sorted(found):
            whole.update(name.encode() + b"\0" + hashlib.sha256(found[name]).digest())
        self.digest = whole.hexdigest()[:16]
        self._index = found.pop("index.html").replace(b"{digest}", self.digest.encode())
        self.files = found
        self._tag = f'"{self.digest}"'.encode()

    async def index(self, call: Call) -> None:
        """The page itself; asked for anew each time, so that an update shows at once."""
        await self._send(call, self._index, "html", ALWAYS_ASK)

    async def asset(self, call: Call) -> None:
        """A file of the page. HttpError not_found for another version's or none of ours."""
        digest, _, name = call.path.removeprefix(PREFIX).partition("/")
        body = self.files.get(name)
        if digest != self.digest or body is None:
            raise HttpError("not_found", "no such path")
        await self._send(call, body, name.rpartition(".")[2] if "." in name else "", FOREVER)

    async def _send(self, call: Call, body: bytes, kind: str, cache: bytes) -> None:
        headers = [(b"etag", self._tag), (b"cache-control", cache), *GUARDS]
        held = (call.header("if-none-match") or "").encode("latin-1")
        if self._tag in [tag.strip().removeprefix(b"W/") for tag in held.split(b",")]:
            await call.answer(304, b"", TYPES[kind], headers)
        else:
            await call.answer(200, body, TYPES[kind], headers)


def routes(settings: ServeSettings) -> list[Route]:
    """The page's routes, open to everybody; none if the page is off. Its socket asks for keys."""
    if not settings.page:
        return []
    page = Page()
    return [
        Route("GET", "/", page.index, "open"),
        Route("GET", f"{PREFIX}*", page.asset, "open"),
    ]


def _read(folder: Traversable, prefix: str) -> list[tuple[str, bytes]]:
    found: list[tuple[str, bytes]] = []
    for entry in folder.iterdir():
        if entry.is_dir():
            found += _read(entry, f"{prefix}{entry.name}/")
        else:
            found.append((prefix + entry.name, entry.read_bytes()))
    return found
