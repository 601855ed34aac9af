"""Heads of requests without end, in size, number or time, are cut off; bodies are not kept."""

from __future__ import annotations

import asyncio

import pytest
import uvloop

from spec_serve.api import http_limits
from tests.api.serving import served


async def opened(url: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, port = url.removeprefix("ws://").partition("/")[0].split(":")
    return await asyncio.open_connection(host, int(port))


async def answered(url: str, *pieces: bytes, slowly: bool = False) -> tuple[bytes, int]:
    """Send until the server closes or all is sent; its answer, and the bytes it let us send."""
    reader, writer = await opened(url)
    sent = 0
    try:
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            sent += len(piece)
            if slowly:
                await asyncio.sleep(0.02)
    except ConnectionError:
        pass
    try:
        async with asyncio.timeout(60):
            return await reader.read(), sent
    except ConnectionError:  # reset: what we sent was not read any more
        return b"", sent
    finally:
        writer.close()


START = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
HEADS = {
    "one header without end": (START + b"X: ", *[b"a" * 100_000] * 300),
    "headers without end": (START, *[b"X: %s\r\n" % (b"a" * 5_000)] * 6000),
    "a path without end": (b"GET /", *[b"a" * 100_000] * 300),
}


@pytest.mark.parametrize("pieces", HEADS.values(), ids=HEADS)
def test_a_head_has_a_size(pieces: tuple[bytes, ...]) -> None:
    async def go() -> None:
        async with served() as (_, url):
            answer, sent = await answered(url, *pieces)
            assert answer.startswith(b"HTTP/1.1 431 ") or not answer
            # What the sockets of both sides hold is gone too, but not tens of megabytes.
            assert sent < 20_000_000
            answer, _ = await answered(url, START, b"X: %s\r\n\r\n" % (b"a" * 60_000))
            assert answer.startswith(b"HTTP/1.1 200 ")

    uvloop.run(go())


def test_a_head_has_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_limits, "HEAD_S", 0.2)

    async def go() -> None:
        async with served() as (_, url):
            for pieces in ((), (START,), (START, *[b"X: a\r\n"] * 500)):
                answer, sent = await answered(url, *pieces, slowly=True)
                assert answer.startswith(b"HTTP/1.1 408 ") or (not answer and sent)
            monkeypatch.setattr(http_limits, "HEAD_S", 20.0)
            whole = START + b"\r\n"
            answer, _ = await answered(url, *(whole[i : i + 1] for i in range(len(whole))))
            assert answer.startswith(b"HTTP/1.1 200 ")

    uvloop.run(go())


def test_requests_one_after_the_other_are_measured_apart() -> None:
    async def go() -> None:
        async with served() as (_, url):
            one = b"GET /health HTTP/1.1\r\nHost: x\r\nX: %s\r\n\r\n" % (b"a" * 50_000)
            last = one.replace(b"Host: x", b"Host: x\r\nConnection: close")
            answer, _ = await answered(url, *[one] * 5, last)
            assert answer.count(b"HTTP/1.1 200 ") == 6

    uvloop.run(go())


def test_a_body_in_single_bytes_is_let_through_and_not_kept() -> None:
    async def go() -> None:
        async with served() as (_, url):
            head = b"POST /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            chunks = b"1\r\na\r\n" * 100_000 + b"0\r\n\r\n"
            answer, _ = await answered(url, head, b"Transfer-Encoding: chunked\r\n\r\n", chunks)
            assert answer.startswith(b"HTTP/1.1 405 ") or not answer
            answer, _ = await answered(url, START, b"\r\n")
            assert answer.startswith(b"HTTP/1.1 200 ")

    uvloop.run(go())


@pytest.mark.parametrize("size", [70_000, 100_000, 200_000, 500_000])
def test_the_last_piece_of_a_body_may_be_large(size: int) -> None:
    async def go() -> None:
        async with served() as (_, url):
            head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\n"
            body = b'"' + b"x" * (size - 2) + b'"'
            pieces = (head + b"Content-Length: %d\r\n\r\n" % size, body)
            for _ in range(5):
                answer, _ = await answered(url, *pieces, slowly=True)
                assert answer.startswith(b"HTTP/1.1 400 "), answer[:100]

    uvloop.run(go())
