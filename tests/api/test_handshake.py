"""Handshakes that are refused say why, with the status a client can act on; and who is warned."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import uvloop
import websockets
from websockets.asyncio.client import connect

from spec_serve.api import messages as m
from spec_serve.api import server as module
from tests.api.raw import raw
from tests.api.serving import served

pytestmark = pytest.mark.usefixtures("each_websocket")


async def status(url: str, protocol: str = m.JSON, **kwargs: Any) -> tuple[int, str, Any]:
    with pytest.raises(websockets.InvalidStatus) as caught:
        async with connect(url, subprotocols=[protocol], **kwargs):  # type: ignore[list-item]
            pass
    answer = caught.value.response
    return answer.status_code, answer.body.decode(), answer.headers


def test_a_page_from_elsewhere_is_forbidden() -> None:
    async def go() -> None:
        async with served() as (_, url):
            code, said, _ = await status(url, origin="http://elsewhere.example")
            assert code == 403 and "origin" in said

    uvloop.run(go())


def test_an_unknown_subprotocol_is_a_bad_request() -> None:
    async def go() -> None:
        async with served() as (_, url):
            code, said, _ = await status(url, "specserve.v9.json")
            assert code == 400 and m.JSON in said and m.MSGPACK in said
            # None at all means JSON: the simplest client there is.
            async with connect(url) as socket:
                assert isinstance(m.Codec(m.JSON).server_message(await socket.recv()), m.Hello)

    uvloop.run(go())


def test_a_server_that_drains_says_come_back() -> None:
    async def go() -> None:
        async with served() as (server, url):
            server.service.draining = True
            code, _, headers = await status(url)
            assert code == 503 and int(headers["retry-after"]) > 0

    uvloop.run(go())


@pytest.mark.parametrize(
    ("host", "own"),
    [("127.0.0.1", True), ("127.8.0.2", True), ("::1", True), ("localhost", True),
     ("0.0.0.0", False), ("::", False), ("192.168.1.2", False), ("example.org", False)],
)  # fmt: skip
def test_what_is_loopback(host: str, own: bool) -> None:
    assert module.is_loopback(host) == own


@pytest.mark.parametrize("own", [True, False])
def test_listening_to_everybody_is_warned_of(
    own: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "is_loopback", lambda host: own)

    async def go() -> None:
        async with served():
            pass

    with caplog.at_level(logging.WARNING):
        uvloop.run(go())
    assert ("unencrypted" in caplog.text) != own


def test_the_callers_span_is_that_of_its_generations() -> None:
    parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    async def go() -> None:
        async with served() as (server, url):
            seen: dict[str, str | None] = {}
            server.link.observers.append(
                lambda events: seen.update((e.request.id, e.request.trace) for e in events)
            )
            for trace in (parent, None):
                headers = {} if trace is None else {"traceparent": trace}
                async with raw(url, additional_headers=headers) as client:
                    await client.say(m.generate({"gen": "g", "prompt": "x"}))
                    (started,) = (x for x in await client.rest("g") if isinstance(x, m.Started))
                assert seen[started.id] == trace

    uvloop.run(go())
