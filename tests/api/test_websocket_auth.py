"""Keys on a WebSocket: with the handshake, as a subprotocol, as the first message, not at all."""

from __future__ import annotations

import asyncio
import base64
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop
import websockets
from websockets.frames import Frame, Opcode

from spec_serve.api import messages as m
from spec_serve.api import websocket as module
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.api.websocket_door import KEY_PROTOCOL, offered
from tests.api.echo import Echo
from tests.api.raw import raw
from tests.api.serving import CODECS, served, until

pytestmark = pytest.mark.usefixtures("each_websocket")

KEY = "a-key-of-some-length-0123"
SENT = {"api_keys": (KEY,)}


def wrapped(key: str) -> str:
    return KEY_PROTOCOL + base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


@pytest.mark.parametrize("codec", CODECS)
def test_a_key_with_the_handshake(codec: str) -> None:
    async def go() -> None:
        async with served(**SENT) as (_, url):
            async with raw(url, codec, wrapped(KEY)) as client:
                assert client.socket.subprotocol == codec
                assert isinstance(await client.hear(), m.Hello)
            async with served(api_keys=("plain-ascii-key-0123",)) as (_, other):
                for name, value in (
                    ("Authorization", "Bearer plain-ascii-key-0123"),
                    ("X-Api-Key", "plain-ascii-key-0123"),
                ):
                    async with raw(other, codec, additional_headers={name: value}) as client:
                        assert isinstance(await client.hear(), m.Hello)

    uvloop.run(go())


def test_a_wrong_key_is_refused_with_the_handshake() -> None:
    async def go() -> None:
        async with served(**SENT) as (server, url):
            for protocol in (wrapped(KEY + "x"), KEY_PROTOCOL + "!", KEY_PROTOCOL):
                with pytest.raises(websockets.InvalidStatus) as caught:
                    async with raw(url, m.JSON, protocol):
                        pass
                assert caught.value.response.status_code == 401
                assert caught.value.response.headers["www-authenticate"] == "Bearer"
                assert caught.value.response.body and KEY.encode() not in caught.value.response.body
            for value in ("Bearer wrong", "Basic abc", "Bearer"):
                with pytest.raises(websockets.InvalidStatus) as caught:
                    async with raw(url, additional_headers={"Authorization": value}):
                        pass
                assert caught.value.response.status_code == 401
            assert not server.app.sessions

    uvloop.run(go())


@pytest.mark.parametrize("codec", CODECS)
def test_a_key_as_the_first_message(codec: str) -> None:
    async def go() -> None:
        async with served(**SENT) as (_, url), raw(url, codec) as client:
            await client.say(m.Auth(KEY))
            assert isinstance(await client.hear(), m.Hello)
            await client.say(m.Auth(KEY))  # once more changes nothing
            await client.say(m.generate({"gen": "g", "prompt": "hello"}))
            assert [x.seq for x in await client.rest("g")][:2] == [0, 1]

    uvloop.run(go())


@pytest.mark.parametrize(
    "first", [m.Auth("wrong"), m.Ping(1.0), m.generate({"gen": "g", "prompt": "x"}), "{", ""]
)
def test_anything_else_first_is_told_and_closed(first: object) -> None:
    async def go() -> None:
        async with served(**SENT) as (server, url), raw(url) as client:
            await client.say(first)
            code, heard = await client.closed()
            assert code == 3000
            assert [type(x) for x in heard] == [m.Error] and heard[0].code == "unauthorized"
            await until(lambda: not server.app.sessions)
            assert server.link.idle()

    uvloop.run(go())


def test_silence_is_closed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AUTH_S", 0.1)

    async def go() -> None:
        async with served(**SENT) as (server, url):
            async with raw(url) as client:
                code, heard = await client.closed()
                assert code == 3000 and heard[0].code == "unauthorized"
            monkeypatch.setattr(module, "AUTH_S", 0.7)
            async with raw(url) as client:  # in time: nothing happens later
                await client.say(m.Auth(KEY))
                await client.hear()
                await asyncio.sleep(0.8)
                await client.say(m.Ping(1.0))
                assert isinstance(await client.hear(), m.Pong)
            await until(lambda: not server.app.sessions)

    uvloop.run(go())


def test_a_server_without_keys_asks_for_none() -> None:
    async def go() -> None:
        async with served() as (_, url), raw(url, m.JSON, wrapped("whatever")) as client:
            assert isinstance(await client.hear(), m.Hello)

    uvloop.run(go())


def test_a_resume_needs_the_same_key() -> None:
    other = "another-key-of-some-length"

    async def go() -> None:
        async with served(api_keys=(KEY, other)) as (_, url):
            async with raw(url, m.JSON, wrapped(KEY)) as client:
                token = (await client.hear()).resume_token
                wire = {"gen": "g", "prompt": "x", "resumable": True, "ignore_eos": True}
                await client.say(m.generate(wire))
                await client.hear()
                client.abort()
            for key, gens in ((other, []), (KEY, ["g"])):
                async with raw(url, m.JSON, wrapped(key)) as client:
                    await client.hear()
                    await client.say(m.Resume(token, {"g": -1}))
                    assert await client.hear() == m.Resumed(gens)

    uvloop.run(go())


def test_a_key_taken_away_ends_what_it_opened(tmp_path: Path) -> None:
    file, other = tmp_path / "keys", "another-key-of-some-length"
    file.write_text(f"alice:{KEY}\nbob:{other}\n")
    wire = {"gen": "g", "prompt": "x", "resumable": True, "ignore_eos": True}

    async def go() -> None:
        engine = Echo(pause=0.001, context=1 << 16)  # nothing ends by itself
        async with served(engine, api_key_file=str(file), grpc_port=0) as (server, url):
            assert server.grpc is not None
            async with (
                raw(url, m.JSON, wrapped(KEY)) as alice,
                raw(url, m.JSON, wrapped(other)) as bob,
                raw(url, m.JSON, wrapped(KEY)) as gone,
                grpc.aio.insecure_channel(f"127.0.0.1:{server.grpc.port}") as channel,
            ):
                for client in (alice, bob, gone):
                    await client.say(m.generate(wire))
                    assert [type(await client.hear()) for _ in "12"] == [m.Hello, m.Started]
                stub: Any = pb_grpc.SpecServeStub(channel)
                metadata = [("x-api-key", KEY)]
                session = stub.Session(metadata=metadata)
                assert (await session.read()).HasField("hello")
                watching = stub.WatchStats(pb.WatchStatsRequest(interval_ms=100), metadata=metadata)
                assert (await watching.read()).interval_s > 0
                gone.abort()
                await until(lambda: server.service.shelf.dropped == 1)
                assert len(server.service.admission.live) == 3
                server.reread()  # the same keys: nothing happens
                file.write_text(f"alice:{KEY}-new\nbob:{other}\n")
                server.reread()
                code, heard = await alice.closed()
                assert code == 3000
                assert [x.code for x in heard if isinstance(x, m.Error)] == ["unauthorized"]
                for call in (session, watching):
                    with pytest.raises(grpc.aio.AioRpcError) as caught:
                        while await call.read():
                            pass
                    assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
                await until(lambda: len(server.service.admission.live) == 1)
                assert server.service.shelf.dropped == 0 and len(server.app.sessions) == 1
                while not isinstance(await bob.hear(), m.Delta):  # goes on
                    pass

    uvloop.run(go())


def test_which_subprotocols_are_offered() -> None:
    name = b"sec-websocket-protocol"
    assert offered([(name, b"a, b"), (b"host", b"x"), (name, b"c,,")]) == ["a", "b", "c"]


def test_frames_before_a_key_are_bounded_in_number() -> None:
    """The first one that is no key is the last one looked at."""

    async def go() -> None:
        async with served(**SENT) as (server, url), raw(url) as client:
            ping = Frame(Opcode.TEXT, b'{"type":"ping","t":1}').serialize(mask=True)
            client.socket.transport.write(ping * 1000)
            code, heard = await client.closed()
            assert code == 3000 and len(heard) == 1
            await until(lambda: not server.app.sessions)

    uvloop.run(go())
