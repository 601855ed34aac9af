"""The client and the real server over a connection that breaks again and again, anywhere."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import uvloop

from spec_serve.api import messages as m
from spec_serve.client import Client
from tests.api.echo import Echo
from tests.api.serving import served, until


class Cutting:
    """A proxy that cuts every connection after some hundred bytes, as long as it is told to.

    early: the share of connections cut in the handshake or right behind it.
    """

    def __init__(self, port: int, seed: int, early: float) -> None:
        self.cuts = 0
        self.cutting = True
        self._port, self._early = port, early
        self._chance = random.Random(seed)
        self._tasks: set[asyncio.Task[None]] = set()

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there, out = await asyncio.open_connection("127.0.0.1", self._port)
        soon = self._chance.random() < self._early and self.cuts > 0
        least, most = (100, 900) if soon else (1500, 5000)
        left = self._chance.randint(least, most)

        async def pump(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
            nonlocal left
            while data := await source.read(64):
                left -= len(data)
                if self.cutting and left < 0:
                    self.cuts += 1
                    return
                to.write(data)

        pumps = [asyncio.create_task(pump(reader, out)), asyncio.create_task(pump(there, writer))]
        await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        for task in pumps:
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError, ConnectionError):
                await task
        for one in (writer, out):
            one.transport.abort()


@asynccontextmanager
async def cutting(port: int, seed: int, early: float) -> AsyncIterator[tuple[Cutting, str]]:
    proxy = Cutting(port, seed, early)
    server = await asyncio.start_server(proxy, "127.0.0.1", 0)
    try:
        yield proxy, f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    finally:
        server.close()
        await asyncio.sleep(0.05)


@pytest.mark.parametrize("codec", [m.JSON, m.MSGPACK])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_answers_are_whole_whatever_breaks(codec: str, seed: int) -> None:
    async def go() -> None:
        engine = Echo(2, 0.002, rows=8)
        async with served(engine) as (server, _):
            async with (
                cutting(server.port, seed, 0.3) as (proxy, url),
                Client(url, codec, resume=True) as client,
            ):
                texts = [f"{i} and the text number {i} " * 12 for i in range(6)]

                async def one(text: str) -> None:
                    events = [event async for event in client.generate(prompt=text, steps="none")]
                    assert [event.seq for event in events] == list(range(len(events)))
                    said = "".join(e.text for e in events if isinstance(e, m.Delta))
                    assert said == text

                await asyncio.wait_for(asyncio.gather(*map(one, texts)), 60)
                assert proxy.cuts >= 3 and client.resumes >= 3
                assert client.errors == []
            await until(engine.idle)

    uvloop.run(go())
