"""Dropped sockets: what goes on, what ends, and what a new socket gets to hear."""

from __future__ import annotations

import asyncio
import os
import random
from dataclasses import replace
from typing import Any

import pytest
import uvloop

from spec_serve.api import messages as m
from tests.api import serving
from tests.api.echo import Echo
from tests.api.raw import Raw, raw
from tests.api.serving import CODECS, served, until

pytestmark = pytest.mark.usefixtures("each_websocket")

HEAD = (
    b"GET /v1/stream HTTP/1.1\r\nhost: x\r\nupgrade: websocket\r\nconnection: upgrade\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
PROMPT = "a\U0001f600\u6f22bcd"


def asked(gen: str = "g", resumable: bool = True, **values: Any) -> m.Generate:
    return m.generate({"gen": gen, "prompt": PROMPT, "resumable": resumable, **values})


async def hello(client: Raw) -> m.Hello:
    first = await client.hear()
    assert isinstance(first, m.Hello)
    return first


def text(messages: list[Any]) -> str:
    return "".join(x.text for x in messages if isinstance(x, m.Delta))


@pytest.mark.parametrize("codec", CODECS)
def test_a_drop_at_every_message(codec: str) -> None:
    async def go() -> None:
        async with served(Echo(2, 0.001)) as (server, url):
            count, at = 99, 0
            while at < count:
                async with raw(url, codec) as first:
                    token = (await hello(first)).resume_token
                    await first.say(asked())
                    seen = [await first.hear() for _ in range(at)]
                    first.abort()
                await until(lambda: not server.app.sessions)
                async with raw(url, codec) as second:
                    await hello(second)
                    await second.say(m.Resume(token, {"g": at - 1}))
                    answer, *rest = await second.rest("g")
                    if at == 0 and answer == m.Resumed([]):  # gone before it was read
                        assert rest[0].code == "resume_gap"
                        at += 1
                        continue
                    assert answer == m.Resumed(["g"])
                    whole = seen + rest
                    assert [x.seq for x in whole] == list(range(len(whole)))
                    assert text(whole) == PROMPT
                    count = len(whole)
                at += 1
            await until(lambda: not server.app.sessions and server.link.idle())

    uvloop.run(go())


def test_ways_to_part() -> None:
    async def go() -> None:
        engine = Echo(1, 0.002)
        async with served(engine) as (server, url):
            for code, goes_on in ((1000, False), (1001, False), (1011, True), (4000, True)):
                async with raw(url) as client:
                    token = (await hello(client)).resume_token
                    await client.say(asked(ignore_eos=True))
                    await client.hear()
                    await client.socket.close(code)
                await until(lambda: not server.app.sessions)
                if not goes_on:
                    await until(engine.idle)
                async with raw(url) as client:
                    await hello(client)
                    await client.say(m.Resume(token, {"g": 0}))
                    assert await client.hear() == m.Resumed(["g"] if goes_on else [])
                    await client.say(m.Cancel("g"))
                    await client.rest("g")

    uvloop.run(go())


def test_a_socket_that_is_taken_over_from_is_closed() -> None:
    async def go() -> None:
        async with served(Echo(1, 0.002)) as (_, url), raw(url) as first, raw(url) as second:
            token = (await hello(first)).resume_token
            await hello(second)
            await first.say(asked(ignore_eos=True))
            await first.say(asked("mine", resumable=False, ignore_eos=True))
            assert (await first.hear()).seq == 0
            await second.say(m.Resume(token, {"g": -1}))
            code, _ = await first.closed()
            assert code == 4409
            assert await second.hear() == m.Resumed(["g"])
            seqs = [(await second.hear()).seq for _ in range(20)]
            assert seqs == list(range(20))
            await second.say(m.Cancel("g"))
            assert (await second.rest("g"))[-1].reason == "cancelled"

    uvloop.run(go())


def test_ended_in_the_meantime_and_forgotten_at_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "SETTINGS", replace(serving.SETTINGS, resume_window_s=1.0))

    async def go() -> None:
        async with served() as (server, url):
            async with raw(url) as client:
                said = await hello(client)
                assert said.resume_window_s == 1.0
                await client.say(asked())
                await client.rest("g")
                client.abort()
            await until(lambda: not server.app.sessions)
            async with raw(url, m.MSGPACK) as client:  # another encoding is as good
                await hello(client)
                await client.say(m.Resume(said.resume_token, {"g": 1}))
                answer, *rest = await client.rest("g")
                assert answer == m.Resumed(["g"]) and rest[0].seq == 2
                client.abort()
            await until(lambda: len(server.service.shelf) == 0)
            async with raw(url) as client:
                await hello(client)
                await client.say(m.Resume(said.resume_token, {"g": 1}))
                answer, error = await client.rest("g")
                assert answer == m.Resumed([]) and error.code == "resume_gap"

    uvloop.run(go())


def test_500_connects_dropped_at_random_points_leave_nothing(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(serving, "SETTINGS", replace(serving.SETTINGS, resume_window_s=0.2))
    rng = random.Random(7)

    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async def once(url: str, port: int, i: int) -> None:
        codec = CODECS[i % 2]
        if i % 5 == 0:  # in the middle of the handshake
            _, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(HEAD[: rng.randrange(len(HEAD) + 1)])
            await asyncio.sleep(rng.random() * 0.003)
            writer.transport.abort()
            return
        async with raw(url, codec) as client:
            for number in range(rng.randrange(3)):
                await client.say(asked(f"g{number}", bool(number), ignore_eos=True))
            for _ in range(rng.randrange(6)):
                try:
                    await asyncio.wait_for(client.socket.recv(), 0.01)
                except TimeoutError:
                    break
            client.abort()

    async def go() -> None:
        engine = Echo(2, 0.0005, rows=8)
        async with served(engine) as (server, url):
            await once(url, server.port, 1)
            tasks, files = len(asyncio.all_tasks()), descriptors()
            for start in range(0, 500, 20):
                await asyncio.gather(*(once(url, server.port, start + i) for i in range(20)))
            await until(lambda: not server.app.sessions and server.link.idle())
            await until(lambda: len(server.service.shelf) == 0)
            await until(lambda: len(asyncio.all_tasks()) <= tasks and descriptors() <= files)
            assert server.service.shelf.bytes == 0 and engine.idle()
            assert server._http is not None
            await until(lambda: not server._http.server_state.connections)
            async with raw(url) as client:
                await hello(client)
                await client.say(asked())
                assert text(await client.rest("g")) == PROMPT

    uvloop.run(go())
    assert [r.getMessage() for r in caplog.records if r.name.startswith("spec")] == []
