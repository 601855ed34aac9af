"""A storm of bad requests over every transport of a real server, beside streams that go on as ever.

The streams' tokens are compared with those of an idle server. Afterwards nothing may be left.
"""

from __future__ import annotations

import asyncio
import collections
import json
import random
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.client import Client
from tests.api.nasty import mutated, requests
from tests.servers import Server, ask_grpc, ask_socket, start
from tests.tiny import write_tiny_model_dir

ASKED: list[dict[str, Any]] = [
    {"prompt": "the other the other", "max_tokens": 60, "ignore_eos": True},
    {
        "prompt": "another", "max_tokens": 60, "ignore_eos": True,
        "sampling": {"temperature": 0.9, "seed": 4711},
    },
]  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = write_tiny_model_dir(tmp_path_factory.mktemp("tiny"))
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log) as running:
        yield running
        assert running.process.poll() is None
    said = log.read_text()
    assert "Traceback" not in said and "ERROR" not in said, said[:3000]


def held(server: Server) -> tuple[int, int]:
    """Resident KiB and open descriptors of the server."""
    status = Path(f"/proc/{server.process.pid}/status").read_text()
    resident = int(status.partition("VmRSS:")[2].split()[0])
    return resident, len(list(Path(f"/proc/{server.process.pid}/fd").iterdir()))


async def frames(server: Server, seen: collections.Counter[str], name: str, seed: int) -> None:
    """Bad messages over WebSockets; a socket that the server closes is replaced."""
    chance, codec = random.Random(seed), m.Codec(name)
    good = codec.encode({"type": "generate", "gen": "g", "prompt": "hi", "max_tokens": 4})
    for _ in range(3):
        async with connect(
            server.ws, subprotocols=[Subprotocol(name)], proxy=None, max_size=None
        ) as socket:
            await socket.recv()
            try:
                for i in range(90):
                    data = mutated(chance, good).replace(b"\x00", b"")
                    await socket.send(data.decode("utf-8", "replace") if codec.text else data)
                    if i % 30 == 29:
                        await socket.send(_ping(codec))
                pongs = 0  # until the last one refusals come, then what is served may still
                while True:
                    within_s = 60.0 if pongs < 3 else 0.3
                    message = codec.server_message(await asyncio.wait_for(socket.recv(), within_s))
                    seen[f"socket {type(message).__name__}"] += 1
                    pongs += isinstance(message, m.Pong)
            except (ConnectionClosed, TimeoutError):
                pass


def _ping(codec: m.Codec) -> bytes | str:
    frame = codec.encode({"type": "ping", "t": 1.0})
    return frame.decode() if codec.text else frame


async def bodies(server: Server, seen: collections.Counter[str], seed: int) -> None:
    """Bad bodies to the HTTP interfaces, and bytes that are no HTTP."""
    chance = random.Random(seed)
    host, port = server.health.removeprefix("http://").partition("/")[0].split(":")
    found = list(islice(requests(400, seed), 0, None, 9))
    for made in found:
        sampling = made.get("sampling")
        fields = {**made, **sampling} if isinstance(sampling, dict) else made
        body = json.dumps({"model": "tiny", "max_tokens": 3, **fields}).encode()
        if chance.random() < 0.3:
            body = mutated(chance, body[:2000])
        path = chance.choice(("completions", "chat/completions", "messages", "embeddings"))
        head = (
            f"POST /v1/{path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            f"Content-Length: {len(body)}\r\n\r\n"
        ).encode()
        if chance.random() < 0.1:
            head = mutated(chance, head)
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(head + body)
            writer.write_eof()
            answer = await asyncio.wait_for(reader.read(4096), 60)
            seen[f"http {answer[9:12].decode('latin-1')}"] += 1
        except (TimeoutError, OSError):
            seen["http closed"] += 1
        finally:
            writer.transport.abort()


async def calls(server: Server, seen: collections.Counter[str], seed: int) -> None:
    """Mutated protobufs."""
    chance = random.Random(seed)
    request = pb.GenerateRequest(prompt="hi", sampling=pb.Sampling(temperature=1.0, n=2))
    request.stop.max_tokens = 3
    good = request.SerializeToString()
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        generate = channel.unary_stream("/specserve.v1.SpecServe/Generate")
        for _ in range(150):
            try:
                async for _ in generate(mutated(chance, good), timeout=60):
                    pass
                seen["grpc OK"] += 1
            except grpc.aio.AioRpcError as error:
                seen[f"grpc {error.code().name}"] += 1


async def streams(server: Server, wanted: list[Any], over: Callable[[], bool]) -> int:
    """Ask the same again and again while the storm lasts; how often."""
    count = 0
    async with Client(server.ws, m.MSGPACK) as client:
        while not over() or not count:
            both = await asyncio.gather(*(ask_socket(client, **fields) for fields in ASKED))
            assert [got.told for got in both] == wanted
            count += 1
    return count


def test_streams_are_not_touched_by_a_storm_of_bad_requests(server: Server) -> None:
    seen: collections.Counter[str] = collections.Counter()

    async def solo() -> list[Any]:
        async with Client(server.ws, m.MSGPACK) as client:
            return [(await ask_socket(client, **fields)).told for fields in ASKED]

    async def storm(wanted: list[Any]) -> int:
        storms = [
            asyncio.create_task(work)
            for work in (
                frames(server, seen, m.JSON, 1), frames(server, seen, m.MSGPACK, 2),
                bodies(server, seen, 3), bodies(server, seen, 4), calls(server, seen, 5),
            )
        ]  # fmt: skip
        asked = asyncio.create_task(streams(server, wanted, lambda: all(t.done() for t in storms)))
        await asyncio.gather(*storms)
        return await asked

    wanted = asyncio.run(solo())
    asyncio.run(storm(wanted))  # once to warm up, so that what stays can be told from what grows
    server.wait_idle()
    before = held(server)
    count = asyncio.run(storm(wanted))
    stats = server.wait_idle()
    after = held(server)
    assert count >= 1 and stats.running == stats.waiting == 0
    assert seen["http 500"] == 0 and seen["grpc INTERNAL"] == seen["grpc UNKNOWN"] == 0, seen
    assert seen["http 400"] > 200 and seen["socket Error"] > 200, seen
    assert seen["grpc INVALID_ARGUMENT"] > 50, seen
    assert after[0] < before[0] * 1.15 + 20_000, (before, after)
    assert after[1] <= before[1] + 8, (before, after)
    with grpc.insecure_channel(server.grpc) as channel:
        got = ask_grpc(pb_grpc.SpecServeStub(channel), **ASKED[0])
    assert got.told == wanted[0]
