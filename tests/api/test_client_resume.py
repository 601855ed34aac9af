"""The client comes back after a drop: nothing is lost, nothing seen twice, gaps are told.

Against a server of a few lines that drops when told to, as the real one would not.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import uvloop
from websockets.asyncio.server import ServerConnection, serve

from spec_serve.api import messages as m
from spec_serve.client import Client, ConnectionLost, ServerError
from tests.api.serving import until

CODEC = m.Codec(m.JSON)
USAGE, TIMES = m.Usage(1, 1), m.Timings(0, 0, 0, 0)


class Dropper:
    """Says "0", "1", ... up to `last`; drops its first `drops` sockets after 3 messages each.

    forgets: does not know what was before a drop. again: sends so many seen messages again.
    """

    def __init__(
        self, drops: int = 1, last: int = 9, forgets: bool = False, again: int = 0,
        window: float = 5.0,
    ) -> None:  # fmt: skip
        self.drops, self.last, self.forgets, self.again = drops, last, forgets, again
        self.window = window
        self.heard: list[m.Client] = []
        self.sockets = 0
        self.refusing = False
        self.skip = -1

    def message(self, gen: str, seq: int) -> m.Server:
        if seq == 0:
            return m.Started(gen, 0, "r", "model", 1)
        if seq > self.last:
            return m.Finished(gen=gen, seq=seq, reason="stop", usage=USAGE, timings=TIMES)
        return m.Delta(gen, seq, text=str(seq))

    async def __call__(self, socket: ServerConnection) -> None:
        self.sockets += 1
        number = self.sockets
        hello = m.Hello("s", "0", 32, ["model"], f"token{number}", self.window)
        await self.say(socket, hello)
        async for frame in socket:
            said = CODEC.client_message(frame)
            self.heard.append(said)
            if isinstance(said, m.Generate):
                await self.run(socket, said.gen, 0, number)
            elif isinstance(said, m.Resume):
                assert said.resume_token == f"token{number - 1}"
                kept = [] if self.forgets else list(said.gens)
                await self.say(socket, m.Resumed(kept))
                for gen, seen in said.gens.items():
                    if self.forgets:
                        await self.say(socket, m.Error("resume_gap", "gone", gen=gen, seq=0))
                    else:
                        await self.run(socket, gen, max(0, seen + 1 - self.again), number)

    async def run(self, socket: ServerConnection, gen: str, begin: int, number: int) -> None:
        for seq in range(begin, self.last + 2):
            if number <= self.drops and seq >= begin + 3:
                socket.transport.abort()
                return
            if seq != self.skip:
                await self.say(socket, self.message(gen, seq))

    async def say(self, socket: ServerConnection, message: m.Server) -> None:
        await socket.send(CODEC.encode(message).decode())


@asynccontextmanager
async def dropping(server: Dropper) -> AsyncIterator[str]:
    async with serve(server, "127.0.0.1", 0, subprotocols=[CODEC.name]) as held:  # type: ignore[list-item]
        port = next(iter(held.sockets)).getsockname()[1]
        yield f"127.0.0.1:{port}"


async def text(client: Client, **request: Any) -> str:
    events = [event async for event in client.generate(prompt="a", **request)]
    assert [event.seq for event in events] == list(range(len(events)))
    return "".join(event.text for event in events if isinstance(event, m.Delta))


@pytest.mark.parametrize(("drops", "again"), [(1, 0), (3, 0), (2, 2)])
def test_a_drop_is_not_noticed(drops: int, again: int) -> None:
    async def go() -> None:
        server = Dropper(drops, 29, again=again)
        async with dropping(server) as url, Client(url, m.JSON, resume=True) as client:
            assert await text(client) == "".join(map(str, range(1, 30)))
            assert client.resumes == drops == server.sockets - 1
            resumes = [said for said in server.heard if isinstance(said, m.Resume)]
            step = 3 - again
            assert [said.gens["g0"] for said in resumes] == [2 + step * i for i in range(drops)]

    uvloop.run(go())


def test_without_resume_a_drop_is_told() -> None:
    async def go() -> None:
        server = Dropper()
        async with dropping(server) as url, Client(url, m.JSON) as client:
            with pytest.raises(ConnectionLost) as caught:
                await text(client)
            assert caught.value.code == 1006
            (asked,) = server.heard
            assert isinstance(asked, m.Generate) and not asked.resumable

    uvloop.run(go())


def test_what_the_server_forgot_is_told() -> None:
    async def go() -> None:
        server = Dropper(1, forgets=True)
        async with dropping(server) as url, Client(url, m.JSON, resume=True) as client:
            with pytest.raises(ServerError) as caught:
                await text(client)
            assert caught.value.code == "resume_gap"
            assert await text(client) == "123456789"  # the client lives on

    uvloop.run(go())


def test_what_was_never_seen_begins_anew() -> None:
    class Deaf(Dropper):
        async def run(self, socket: ServerConnection, gen: str, begin: int, number: int) -> None:
            if number == 1:
                socket.transport.abort()
            else:
                await super().run(socket, gen, begin, number)

    async def go() -> None:
        server = Deaf(0, forgets=True)
        async with dropping(server) as url, Client(url, m.JSON, resume=True) as client:
            assert await text(client) == "123456789"
            assert [type(said) for said in server.heard] == [m.Generate, m.Resume, m.Generate]

    uvloop.run(go())


def test_a_missing_message_is_a_gap() -> None:
    async def go() -> None:
        server = Dropper(0)
        server.skip = 4
        async with dropping(server) as url, Client(url, m.JSON) as client:
            with pytest.raises(ServerError) as caught:
                await text(client)
            assert caught.value.code == "resume_gap" and "4" in str(caught.value)
            await until(lambda: any(isinstance(said, m.Cancel) for said in server.heard))

    uvloop.run(go())


def test_who_left_during_a_drop_cancels_after_it() -> None:
    async def go() -> None:
        server = Dropper(1)
        async with dropping(server) as url, Client(url, m.JSON, resume=True) as client:
            events = client.generate(prompt="a")
            for _ in range(3):
                await anext(events)
            while client._up:
                await asyncio.sleep(0)
            await events.aclose()
            await until(lambda: any(isinstance(said, m.Cancel) for said in server.heard))

    uvloop.run(go())


def test_a_server_that_does_not_come_back() -> None:
    async def go() -> None:
        server = Dropper(1, window=0.1)
        async with dropping(server) as url:
            client = Client(url, m.JSON, resume=True, connect_s=0.3)
            await client.__aenter__()
        # Its sockets are closed now, and nobody listens.
        with pytest.raises((ConnectionLost, OSError)):
            await text(client)
        with pytest.raises(OSError):
            await text(client)  # another attempt is made
        await client.close()

    uvloop.run(go())


def test_a_close_that_is_meant_is_not_mended() -> None:
    class Strict(Dropper):
        async def run(self, socket: ServerConnection, gen: str, begin: int, number: int) -> None:
            await socket.close(4408)

    async def go() -> None:
        server = Strict()
        async with dropping(server) as url, Client(url, m.JSON, resume=True) as client:
            with pytest.raises(ConnectionLost) as caught:
                await text(client)
            assert caught.value.code == 4408 and server.sockets == 1

    uvloop.run(go())


def test_acknowledgements_are_few_and_true() -> None:
    async def go() -> None:
        server = Dropper(0, 200)
        async with dropping(server) as url, Client(url, m.JSON, resume=True) as client:
            await text(client)

            def heard() -> list[int]:
                return [said.seq for said in server.heard if isinstance(said, m.Ack)]

            await until(lambda: heard()[-1:] == [201])
            acks = heard()
            assert 3 <= len(acks) <= 8 and acks == sorted(acks) and acks[-1] == 201

    uvloop.run(go())


def test_silence_ends_and_cancels() -> None:
    class Silent(Dropper):
        async def run(self, socket: ServerConnection, gen: str, begin: int, number: int) -> None:
            await self.say(socket, self.message(gen, 0))

    async def go() -> None:
        server = Silent()
        async with dropping(server) as url, Client(url, m.JSON, silence_s=0.1) as client:
            with pytest.raises(TimeoutError, match=r"0\.1 s"):
                await text(client)
            await until(lambda: any(isinstance(said, m.Cancel) for said in server.heard))

    uvloop.run(go())


def test_a_ping_whose_answer_cannot_come_ends() -> None:
    async def go() -> None:
        server = Dropper(0)  # never answers pings
        async with dropping(server) as url:
            async with Client(url, m.JSON) as client:
                waiting = asyncio.create_task(client.ping())
                await until(lambda: bool(server.heard))
                client.abort()
                with pytest.raises(ConnectionLost):
                    await waiting
                with pytest.raises(ConnectionLost):
                    await client.ping()
            server.heard.clear()
            async with Client(url, m.JSON, resume=True) as client:
                waiting = asyncio.create_task(client.ping())
                await until(lambda: len(server.heard) == 1)
                client.abort()
                await until(lambda: len(server.heard) == 2)  # asked again
                waiting.cancel()

    uvloop.run(go())
