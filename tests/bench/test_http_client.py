"""The load's HTTP client against servers of a few bytes: every way in which a body can end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from spec_serve.bench.http_client import HIGH_WATER, HttpClient


class Canned:
    """Answers each request on a connection with the next of `answers`, then closes."""

    def __init__(self, *answers: bytes, pieces: int = 0) -> None:
        self.answers, self.pieces = answers, pieces
        self.connections = 0
        self.requests: list[bytes] = []

    async def __call__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        for answer in self.answers:
            try:
                head = await reader.readuntil(b"\r\n\r\n")
            except (asyncio.IncompleteReadError, ConnectionError):
                break
            length = head.lower().partition(b"content-length:")[2].split(b"\r\n")[0].strip()
            self.requests.append(head + await reader.readexactly(int(length or 0)))
            size = self.pieces or len(answer)
            for i in range(0, len(answer), size):
                writer.write(answer[i : i + size])
                await writer.drain()
                if self.pieces:
                    await asyncio.sleep(0)
        writer.close()


@asynccontextmanager
async def talking(server: Canned, **options: str) -> AsyncIterator[HttpClient]:
    listening = await asyncio.start_server(server, "127.0.0.1", 0)
    port = listening.sockets[0].getsockname()[1]
    client = HttpClient(f"http://127.0.0.1:{port}", **options)  # type: ignore[arg-type]
    try:
        yield client
    finally:
        await client.close()
        listening.close()
        await listening.wait_closed()


FULL = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nX-One: a\r\n\r\nhello"
CHUNKED = (
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    b"6\r\ndata: \r\n3\r\n1\n\n\r\na\r\ndata: 2\r\n\n\r\n0\r\n\r\n"
)


@pytest.mark.parametrize("pieces", [0, 1, 7])
def test_bodies_and_kept_connections(pieces: int) -> None:
    async def go() -> None:
        server = Canned(FULL, CHUNKED, pieces=pieces)
        async with talking(server, api_key="k") as client:
            async with await client.ask("GET", "/a") as answer:
                assert (answer.status, answer.headers["x-one"]) == (200, "a")
                assert await answer.read() == b"hello"
            async with await client.ask("POST", "/b", b"{}") as answer:
                assert [line async for line in answer.lines()] == [b"data: 1", b"", b"data: 2", b""]
        assert server.connections == 1
        assert server.requests[0].startswith(b"GET /a HTTP/1.1\r\nhost: 127.0.0.1:")
        assert b"authorization: Bearer k\r\n" in server.requests[0]
        assert server.requests[1].endswith(b"content-length: 2\r\n\r\n{}")

    asyncio.run(go())


def test_a_connection_closed_meanwhile_is_replaced() -> None:
    async def go() -> None:
        server = Canned(FULL)
        async with talking(server) as client:
            for _ in range(3):
                async with await client.ask("GET", "/") as answer:
                    assert await answer.read() == b"hello"
                await asyncio.sleep(0.02)  # it closes
        assert server.connections == 3

    asyncio.run(go())


def test_a_body_without_length_ends_with_the_connection() -> None:
    async def go() -> None:
        server = Canned(b"HTTP/1.1 500 Oh\r\n\r\nsorry")
        async with talking(server) as client, await client.ask("GET", "/") as answer:
            assert (answer.status, await answer.read()) == (500, b"sorry")

    asyncio.run(go())


@pytest.mark.parametrize(
    "answer",
    [b"", b"HTTP/1.1 200", b"what?\r\n\r\n", FULL[:-1], CHUNKED[:-5]],
    ids=["nothing", "head", "garbage", "length", "chunks"],
)
def test_what_is_cut_short_is_an_error(answer: bytes) -> None:
    async def go() -> None:
        async with talking(Canned(answer)) as client:
            with pytest.raises(ConnectionError):
                async with await client.ask("GET", "/") as got:
                    await got.read()

    asyncio.run(go())


def test_leaving_early_closes_the_connection() -> None:
    async def go() -> None:
        server = Canned(CHUNKED[:-5], FULL)
        async with talking(server) as client:
            for _ in range(2):
                async with await client.ask("GET", "/") as answer:
                    assert answer.status == 200
        assert server.connections == 2
        whole = Canned(FULL, CHUNKED)
        async with talking(whole) as client:
            async with await client.ask("GET", "/") as answer:
                assert answer.complete  # and left unread
            async with await client.ask("GET", "/") as answer:
                assert (await answer.read()).startswith(b"data: 1")
        assert whole.connections == 1

    asyncio.run(go())


def test_a_large_body_does_not_pile_up() -> None:
    async def go() -> None:
        body = b"x" * (8 * HIGH_WATER)
        head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
        server = Canned(head + body)
        async with talking(server) as client, await client.ask("GET", "/") as answer:
            await asyncio.sleep(0.05)
            assert answer._connection._size < 2 * HIGH_WATER
            assert len(await answer.read()) == len(body)

    asyncio.run(go())


def test_addresses() -> None:
    for url in ("ws://h", "127.0.0.1:80", "http://", ""):
        with pytest.raises(ValueError, match="url"):
            HttpClient(url)


def test_nobody_there() -> None:
    async def go() -> None:
        with pytest.raises(OSError):
            await HttpClient("http://127.0.0.1:9").ask("GET", "/")

    asyncio.run(go())
