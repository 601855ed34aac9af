"""How the chat page is served: addresses, types, caching, headers, what is open without a key."""

from __future__ import annotations

import asyncio
import re
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from spec_serve.api.server_settings import ServeSettings
from spec_serve.api.web.page import Page, routes
from tests.api.serving import served

KEY = "a-key-that-is-long-enough"


def fetch(url: str, method: str = "GET", **headers: str) -> tuple[int, dict[str, str], bytes]:
    wanted = {name.replace("_", "-"): value for name, value in headers.items()}
    try:
        with urlopen(Request(url, method=method, headers=wanted), timeout=60) as answer:
            return answer.status, {k.lower(): v for k, v in answer.headers.items()}, answer.read()
    except HTTPError as error:
        return error.code, {k.lower(): v for k, v in error.headers.items()}, error.read()


async def asked(ws: str, path: str, **options: Any) -> tuple[int, dict[str, str], bytes]:
    base = ws.replace("ws://", "http://").removesuffix("/v1/stream")
    return await asyncio.to_thread(fetch, base + path, **options)


def test_the_page_and_all_it_names_are_served() -> None:
    async def go() -> None:
        async with served() as (_, ws):
            status, headers, body = await asked(ws, "/")
            assert status == 200 and headers["content-type"] == "text/html; charset=utf-8"
            assert headers["cache-control"] == "no-cache"
            named = set(re.findall(r'(?:src|href)="(assets/[^"]+)"', body.decode()))
            assert len(named) == 7
            types = {"js": "text/javascript; charset=utf-8", "css": "text/css; charset=utf-8"}
            for name in named:
                status, headers, _ = await asked(ws, f"/{name}")
                assert status == 200, name
                assert "immutable" in headers["cache-control"]
                wanted = types.get(name.rpartition(".")[2], "image/svg+xml")
                assert headers["content-type"] == wanted
                assert headers["x-content-type-options"] == "nosniff"

    asyncio.run(go())


def test_everything_imported_is_there() -> None:
    page = Page()
    held = dict(page.files)
    for name, body in held.items():
        if name.endswith(".js") and not name.startswith("vendor/"):
            for found in re.findall(r'(?:from|import) "\./([^"]+)"', body.decode()):
                assert found in held, (name, found)
    assert b"BSD 3-Clause" in held["vendor/LICENSES"] and b"Apache" in held["vendor/LICENSES"]
    # What other hosts would be asked for, there is none of.
    ours = b"".join(body for name, body in held.items() if not name.startswith("vendor/"))
    assert set(re.findall(rb"https?://[\w.]+", ours)) <= {b"http://www.w3.org"}


def test_browsers_ask_again_and_are_told_it_is_the_same() -> None:
    async def go() -> None:
        async with served() as (_, ws):
            _, headers, body = await asked(ws, "/")
            status, again, nothing = await asked(ws, "/", if_none_match=headers["etag"])
            assert (status, nothing) == (304, b"") and again["etag"] == headers["etag"]
            status, _, _ = await asked(ws, "/", if_none_match='"other"')
            assert status == 200
            status, head, nothing = await asked(ws, "/", method="HEAD")
            assert (status, nothing) == (200, b"")
            assert int(head["content-length"]) == len(body)

    asyncio.run(go())


def test_nothing_else_is_served() -> None:
    digest = Page().digest

    async def go() -> None:
        async with served() as (_, ws):
            for rest in (
                "", "x/app.js", digest, f"{digest}/", f"{digest}/no.js", f"{digest}/../page.py",
                f"{digest}/%2e%2e/page.py", f"{digest}/index.html", f"{digest}//app.js",
            ):  # fmt: skip
                status, _, body = await asked(ws, f"/assets/{rest}")
                assert status == 404 and b"error" in body, rest

    asyncio.run(go())


def test_the_policy_lets_nothing_in_and_nothing_out() -> None:
    async def go() -> None:
        async with served() as (_, ws):
            _, headers, body = await asked(ws, "/")
            policy = dict(
                part.strip().partition(" ")[::2]
                for part in headers["content-security-policy"].split(";")
            )
            assert policy["default-src"] == policy["connect-src"] == policy["style-src"] == "'self'"
            for name in ("frame-ancestors", "base-uri", "form-action", "object-src"):
                assert policy[name] == "'none'"
            assert policy["require-trusted-types-for"] == "'script'"
            assert not re.search(rb"<script(?![^>]*\bsrc=)|\son\w+=|\sstyle=", body)
            assert headers["referrer-policy"] == "no-referrer"

    asyncio.run(go())


def test_the_page_is_open_where_keys_are_needed_and_its_socket_is_not() -> None:
    async def go() -> None:
        async with served(api_keys=(KEY,)) as (_, ws):
            status, _, body = await asked(ws, "/")
            assert status == 200 and b"<html" in body
            assert (await asked(ws, f"/assets/{Page().digest}/app.js"))[0] == 200
            assert (await asked(ws, "/version"))[0] == 401
            assert (await asked(ws, "/version", authorization=f"Bearer {KEY}"))[0] == 200

    asyncio.run(go())


def test_the_page_can_be_off() -> None:
    assert routes(ServeSettings(page=False)) == []

    async def go() -> None:
        async with served(page=False) as (_, ws):
            status, headers, body = await asked(ws, "/")
            assert status == 200 and headers["content-type"] == "application/json"
            assert b"spec-serve" in body
            assert (await asked(ws, f"/assets/{Page().digest}/app.js"))[0] == 404

    asyncio.run(go())
