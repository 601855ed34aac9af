"""What a server gives away or keeps: failures told without particulars, no fetching, no leftovers.

Rows of the security list that concern a running server and have no place elsewhere.
"""

from __future__ import annotations

import asyncio
import json
import logging
import random
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop
from websockets.asyncio.client import connect
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from spec_serve.spec.request import Request
from tests.api.echo import ByteTokens, Echo
from tests.api.processes import Running, echo_server
from tests.api.serving import served

SECRET = "/srv/models/secret <object at 0x7f00deadbeef> Traceback"
BETRAYALS = ("0x", "/srv", "Traceback", "secret", ".py")
CHAT = {"model": "echo", "max_tokens": 4, "messages": [{"role": "user", "content": "hi"}]}
PATHS: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "echo", "prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": CHAT,
    "/v1/messages": CHAT,
}


async def posted(url: str, path: str, body: object) -> str:
    host, port = url.removeprefix("ws://").partition("/")[0].split(":")
    data = json.dumps(body).encode()
    reader, writer = await asyncio.open_connection(host, int(port))
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
    writer.write(f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data)
    try:
        return (await asyncio.wait_for(reader.read(), 20)).decode()
    finally:
        writer.close()


async def over_socket(url: str, **fields: Any) -> m.Error:
    codec, kind = m.Codec(m.JSON), Subprotocol(m.JSON)
    async with connect(url, subprotocols=[kind], proxy=None) as opened:
        await opened.send(codec.encode({"type": "generate", "gen": "g", **fields}).decode())
        while True:
            message = codec.server_message(await asyncio.wait_for(opened.recv(), 20))
            if isinstance(message, m.Error):
                return message


class Failing(Echo):
    """Fails where it is asked to, in words that nobody outside shall read."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self._where = where

    def validate(self, request: Request) -> None:
        if self._where == "validate":
            raise RuntimeError(SECRET)
        super().validate(request)

    def submit(self, request: Request) -> None:
        if self._where == "submit":
            raise KeyError(SECRET)
        super().submit(request)


class Misreading(ByteTokens):
    """A tokenizer and a template that fail."""

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        raise OSError(SECRET)

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        raise RuntimeError(SECRET)


@pytest.mark.parametrize("where", ["validate", "submit", "tokenizer"])
def test_failures_inside_are_told_without_particulars(
    where: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with served(Failing(where)) as (server, url):
            if where == "tokenizer":
                server.service.tokenizer = Misreading()
            answers = [
                await posted(url, path, {**body, "stream": stream})
                for path, body in PATHS.items()
                for stream in (False, True)
            ]
            answers.append((await over_socket(url, prompt="hi")).message)
            answers.append((await over_socket(url, messages=CHAT["messages"])).message)
            for answer in answers:
                assert answer and not any(word in answer for word in BETRAYALS), answer
            assert server.service.admission.inside == 0 and not server.service.admission.live

    with caplog.at_level(logging.ERROR):
        uvloop.run(go())
    assert SECRET in caplog.text  # the operator is told


@contextmanager
def trap() -> Iterator[tuple[str, socket.socket]]:
    """An address on which nobody may ever call."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        listening.setblocking(False)
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/picture.png", listening


def test_nothing_that_a_message_names_is_fetched() -> None:
    async def go() -> None:
        with trap() as (url, listening):
            async with served() as (_, address):
                parts = [
                    [{"type": "image_url", "image_url": {"url": url}}],
                    [{"type": "text", "text": "see"}, {"type": "image_url", "image_url": url}],
                    [{"type": "input_image", "image_url": url}],
                    [{"type": "file", "file": {"file_data": url}}],
                    [{"type": "image", "source": {"type": "url", "url": url}}],
                    [{"type": "audio_url", "audio_url": {"url": url}}],
                ]
                for content in parts:
                    messages = [{"role": "user", "content": content}]
                    for path in ("/v1/chat/completions", "/v1/messages"):
                        answer = await posted(address, path, {**CHAT, "messages": messages})
                        assert answer.startswith("HTTP/1.1 400 "), answer[:300]
                    error = await over_socket(address, messages=messages)
                    assert error.code == "invalid_request"
                text = f"![a]({url}) <img src={url}> {url}"
                messages = [{"role": "user", "content": text}]
                chat = "/v1/chat/completions"
                answer = await posted(address, chat, {**CHAT, "messages": messages})
                assert answer.startswith("HTTP/1.1 200 ")
                for extra in ({"chat_template": url}, {"documents": [url]}, {"template": url}):
                    answer = await posted(address, chat, {**CHAT, **extra})
                    assert answer.startswith(("HTTP/1.1 400 ", "HTTP/1.1 200 "))
            with pytest.raises(BlockingIOError):
                listening.accept()

    uvloop.run(go())


def held(server: Running) -> tuple[int, int, int]:
    """Open descriptors, threads and resident KiB of a server."""
    folder = Path(f"/proc/{server.process.pid}")
    status = (folder / "status").read_text()
    threads, resident = (
        int(status.partition(name)[2].split()[0]) for name in ("Threads:", "VmRSS:")
    )
    return len(list((folder / "fd").iterdir())), threads, resident


def exchanges(chance: random.Random) -> bytes:
    """The beginning of something a client could say, cut at any point."""
    body = json.dumps({"model": "echo", "prompt": "x" * 50, "max_tokens": 500, "stream": True,
                       "ignore_eos": True}).encode()  # fmt: skip
    frame = json.dumps({"type": "generate", "gen": "g", "prompt": "x", "ignore_eos": True}).encode()
    masked = b"\x81" + bytes([0x80 | len(frame)]) + b"\x00\x00\x00\x00" + frame
    whole = chance.choice(
        [
            b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s"
            % (len(body), body),
            b"GET /v1/stream HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\n"
            b"Upgrade: websocket\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
            b"Sec-WebSocket-Version: 13\r\n\r\n" + masked,
            b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(9) * 3,
        ]
    )
    return whole[: chance.choice([len(whole), chance.randrange(len(whole) + 1)])]


def drop(address: tuple[str, int], chance: random.Random) -> None:
    """Connect, say something, perhaps read a little, and go: politely or with a reset."""
    with socket.create_connection(address, timeout=60) as client:
        try:
            client.sendall(exchanges(chance))
            if chance.random() < 0.3:
                client.settimeout(0.002)
                client.recv(chance.randint(1, 500))
        except OSError:
            pass
        if chance.random() < 0.5:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))


def test_5000_connections_that_drop_at_any_point_leave_nothing() -> None:
    chance = random.Random(11)
    with echo_server({"pause": 0.002, "rows": 64}) as server:
        where = server.health.partition("://")[2].partition("/")[0].split(":")
        ends = [(where[0], int(where[1]))] * 5
        ends.append(("127.0.0.1", int(server.grpc.rpartition(":")[2])))

        def storm(count: int) -> tuple[int, int, int]:
            for _ in range(count):
                drop(chance.choice(ends), chance)
            end = time.monotonic() + 60
            while True:  # the last ones are noticed a moment later
                found = held(server)
                if found[0] <= quiet[0] + 3 or time.monotonic() > end:
                    return found
                time.sleep(0.1)

        quiet = held(server)
        warm = storm(1500)
        after = storm(3500)
        assert after[0] <= quiet[0] + 3, (quiet, warm, after)
        assert after[1] <= warm[1] + 4, (quiet, warm, after)
        assert after[2] <= warm[2] * 1.1 + 4000, (quiet, warm, after)

        async def whole() -> str:
            return await posted("ws://{}:{}".format(*ends[0]), "/v1/completions",
                                PATHS["/v1/completions"])  # fmt: skip

        assert '"text":"hi"' in uvloop.run(whole())
        server.process.terminate()
        code, said = server.ended()
        assert code == 0 and "Traceback" not in said, said
