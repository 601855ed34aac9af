"""Frames as clients should and should not send them, on both implementations; pings; handshakes."""

from __future__ import annotations

import asyncio
import resource
from typing import Any

import pytest
import uvloop
import websockets
from websockets.frames import Frame, Opcode

from spec_serve.api import messages as m
from spec_serve.api import picows_bridge, picows_socket
from tests.api.echo import Echo
from tests.api.raw import raw
from tests.api.serving import served, until

HELLO = b'{"type":"ping","t":1}'
KEY = b"sec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n"
ASKS = b"upgrade: websocket\r\nconnection: upgrade\r\nsec-websocket-version: 13\r\n" + KEY


def frame(opcode: Opcode, data: bytes, fin: bool = True, reserved: int = 0) -> bytes:
    made = Frame(opcode, data, fin).serialize(mask=True)
    return bytes([made[0] | reserved]) + made[1:]


async def closed_after(url: str, *frames: bytes, codec: str = m.JSON) -> int | None:
    """The code of the close frame that this gets."""
    async with raw(url, codec) as client:
        await client.hear()
        client.socket.transport.writelines(frames)
        return (await client.closed())[0]


async def upgrade(port: int, head: bytes, path: bytes = b"/v1/stream") -> tuple[int, bytes, Any]:
    """Status, head of the answer, and the streams."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(b"GET " + path + b" HTTP/1.1\r\nhost: 127.0.0.1\r\n" + head + b"\r\n")
    answer = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 60)
    return int(answer.split()[1]), answer.lower(), (reader, writer)


@pytest.mark.usefixtures("each_websocket")
def test_a_message_in_fragments() -> None:
    async def go() -> None:
        async with served() as (_, url), raw(url) as client:
            await client.hear()
            write = client.socket.transport.write
            for cut in range(len(HELLO) + 1):
                write(frame(Opcode.TEXT, HELLO[:cut], fin=False))
                write(frame(Opcode.PING, b"between"))
                write(frame(Opcode.CONT, HELLO[cut:]))
                said = await client.hear()
                assert isinstance(said, m.Pong) and said.t == 1.0

    uvloop.run(go())


@pytest.mark.usefixtures("each_websocket")
@pytest.mark.parametrize(
    ("frames", "codes"),
    [
        ([frame(Opcode.CONT, b"x")], {1002}),
        ([frame(Opcode.TEXT, b"x", fin=False), frame(Opcode.TEXT, b"x")], {1002}),
        ([frame(Opcode.TEXT, HELLO, reserved=0x40)], {1002}),
        ([frame(Opcode.TEXT, HELLO, reserved=0x10)], {1002}),
        ([Frame(Opcode.TEXT, HELLO).serialize(mask=False)], {1002}),
        ([b"\x83\x80aaaa"], {1002}),  # an opcode nobody knows
        ([b"\x89\xfe\x00\x80aaaa" + bytes(128)], {1002}),  # a ping of 128 bytes
        ([frame(Opcode.TEXT, b"\xff\xfe")], {1007}),
        ([frame(Opcode.TEXT, b"\xf0\x9f", fin=False), frame(Opcode.CONT, b"x")], {1007}),
        ([frame(Opcode.BINARY, b"\x80")], {1003}),
        ([b"\x81\xff\x00\x00\x00\x00\x7f\xff\xff\xffaaaa"], {1009}),
        ([frame(Opcode.TEXT, b" " * (5 << 20), fin=False), frame(Opcode.CONT, b" " * (5 << 20))],
         {1009}),
    ],
)  # fmt: skip
def test_frames_that_break_the_protocol(frames: list[bytes], codes: set[int]) -> None:
    async def go() -> None:
        async with served() as (server, url):
            assert await closed_after(url, *frames) in codes
            await until(lambda: not server.app.sessions)

    uvloop.run(go())


@pytest.mark.usefixtures("each_websocket")
def test_a_hundred_thousand_fragments_are_bounded() -> None:
    async def go() -> None:
        async with served() as (server, url):
            before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
            for piece in (b"", b" "):
                async with raw(url) as client:
                    await client.hear()
                    part = frame(Opcode.CONT, piece, fin=False) * 1000
                    write = client.socket.transport.write
                    write(frame(Opcode.TEXT, b" ", fin=False))
                    try:
                        for _ in range(100):
                            write(part)
                            await asyncio.sleep(0)
                        write(frame(Opcode.CONT, HELLO))
                        assert isinstance(await client.hear(), m.Pong)
                    except (RuntimeError, websockets.ConnectionClosed):
                        await client.socket.wait_closed()
                        assert client.socket.close_code in (1008, 1006)
            await until(lambda: not server.app.sessions)
            grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
            assert grown < 60_000  # KiB

    uvloop.run(go())


@pytest.mark.usefixtures("each_websocket")
def test_thousands_of_messages_in_one_go_are_all_answered_in_order() -> None:
    async def go() -> None:
        async with served() as (_, url), raw(url) as client:
            await client.hear()
            said = [m.Codec(m.JSON).encode(m.Ping(float(i))) for i in range(3000)]
            client.socket.transport.write(b"".join(frame(Opcode.TEXT, one) for one in said))
            assert [(await client.hear()).t for _ in said] == list(map(float, range(3000)))

    uvloop.run(go())


def test_handshakes_by_hand(each_websocket: str) -> None:
    async def go() -> None:
        async with served() as (server, _):
            port = server.port
            ok = ASKS + b"sec-websocket-extensions: permessage-deflate\r\n"
            # `websockets` stops reading at 8 KiB a line, and says nothing.
            filler = b"x-filler: " + b"x" * 40_000 + b"\r\n"
            for more in (b"", filler)[: 1 + (each_websocket == "picows")]:
                status, head, (_, writer) = await upgrade(port, ok + more)
                assert status == 101 and b"sec-websocket-ext" not in head
                assert b"sec-websocket-protocol" not in head
                writer.transport.abort()
            # As a browser says it that keeps its connections.
            two = ASKS.replace(b"connection: upgrade", b"connection: keep-alive, Upgrade")
            status, _, (_, writer) = await upgrade(port, two)
            assert status == 101
            writer.transport.abort()
            for head, path in (
                (ASKS.replace(b"13", b"8"), b"/v1/stream"),
                (ASKS.replace(KEY, b""), b"/v1/stream"),
                (ASKS.replace(b"==", b""), b"/v1/stream"),
                (ASKS, b"/v1/nothing"),
            ):
                status, _, (_, writer) = await upgrade(port, head, path)
                assert 400 <= status < 500, (status, head, path)
                writer.transport.abort()
            await until(lambda: not server.app.sessions)

    uvloop.run(go())


@pytest.mark.usefixtures("each_websocket")
def test_a_close_frame_is_answered() -> None:
    async def go() -> None:
        async with served() as (server, url):
            for code in (1000, 1001, 3999, 4999):
                async with raw(url) as client:
                    await client.hear()
                    await client.socket.close(code, "thank you")
                    assert client.socket.close_code == code
                await until(lambda: not server.app.sessions)

    uvloop.run(go())


def test_who_answers_no_ping_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picows_bridge, "PING_S", 0.5)
    monkeypatch.setattr(picows_bridge, "PONG_S", 0.5)

    async def go() -> None:
        engine = Echo(1, 0.01)
        async with served(engine) as (server, url), raw(url) as lively, raw(url) as dead:
            await lively.hear()
            token = (await dead.hear()).resume_token
            wire = {"gen": "g", "prompt": "x", "ignore_eos": True, "resumable": True}
            await dead.say(m.generate(wire))
            dead.socket.transport.pause_reading()  # a half-open connection
            await until(lambda: len(server.app.sessions) == 1)
            await asyncio.sleep(0.8)
            await lively.say(m.Ping(1.0))
            assert isinstance(await lively.hear(), m.Pong)
            await lively.say(m.Resume(token, {"g": -1}))  # it was dropped, not closed
            assert await lively.hear() == m.Resumed(["g"])
            dead.abort()

    uvloop.run(go())


def test_pings_nobody_reads_the_answers_of_are_not_held() -> None:
    async def go() -> None:
        async with served() as (server, url), raw(url, ping_interval=None) as client:
            await client.hear()
            client.socket.transport.pause_reading()
            flood = frame(Opcode.PING, b"x" * 125) * 2000
            (socket,) = server.app.sessions
            for _ in range(60):
                client.socket.transport.write(flood)
                await asyncio.sleep(0.01)
            assert isinstance(socket, picows_socket.PicowsSocket)
            assert socket.transport.get_write_buffer_size() < 1 << 20
            client.abort()

    uvloop.run(go())


def test_slow_for_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than a MiB waits, but for longer than a reader may be away."""
    monkeypatch.setattr(picows_socket, "MAX_STUCK_S", 0.3)

    async def go() -> None:
        engine = Echo(40, 0.002, context=1 << 20)
        async with served(engine) as (server, url), raw(url, ping_interval=None) as client:
            await client.hear()
            wire = {"gen": "g", "prompt": "x" * 99, "ignore_eos": True, "logprobs": 20}
            (socket,) = server.app.sessions
            assert isinstance(socket, picows_socket.PicowsSocket)
            client.socket.transport.pause_reading()
            await client.say(m.generate(wire))
            await until(lambda: socket._paused)
            engine.pause = 0.1
            await until(lambda: engine.idle() and not server.app.sessions)
            assert socket.closing == 4408
            client.abort()

    uvloop.run(go())
