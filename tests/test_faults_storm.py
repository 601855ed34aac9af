"""Bad inputs over every door of a server at once, beside streams on every transport.

The streams' text is that of an idle server, throughout. The engine is a process of its own; for one
in a thread see test_bad_input_live.py. Of the bad inputs that a run of all tests tries, 270,000
come from tables and mutations (api/test_bad_input.py: 135,000 of JSON, MessagePack and protobuf;
api/test_grpc_fuzz.py: 50,000 each of calls, sessions and gateways' calls), which this module
counts; to them come those that are sent to live servers here, hypothesis's and schemathesis's.
"""

from __future__ import annotations

import ast
import asyncio
import collections
import random
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc

from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from tests.api.nasty import mutated
from tests.servers import TRANSPORTS, Server, start
from tests.streams import Stream
from tests.test_bad_input_live import bodies, calls, frames
from tests.test_faults import ASKED, address, answers, balanced
from tests.tiny import write_tiny_model_dir

GATEWAY = "/vllm.grpc.engine.VllmEngine/Generate"
SESSION = "/specserve.v1.SpecServe/Session"


async def messages(
    server: Server, seen: collections.Counter[str], method: str, good: bytes, seed: int
) -> None:
    """Mutated protobufs to a method that takes one message, or as many as there are."""
    chance = random.Random(seed)
    async with grpc.aio.insecure_channel(server.grpc) as channel:
        single = channel.unary_stream(method)
        many = channel.stream_stream(method)
        for turn in range(120):
            bad = [mutated(chance, good) for _ in range(4 if method == SESSION else 1)]
            try:
                answer = many(iter(bad), timeout=60) if method == SESSION else single(bad[0])
                async for _ in answer:
                    if turn % 3 == 0:
                        break
                answer.cancel()
                seen["grpc OK"] += len(bad)
            except grpc.aio.AioRpcError as error:
                # What the client itself makes of a call that ends while it still sends.
                own = error.details() == "Internal error from Core"
                name = "ended early" if own else error.code().name
                seen[f"grpc {name}"] += len(bad)


async def storm(server: Server, seen: collections.Counter[str], seed: int) -> None:
    """All kinds at once."""
    request = pb.GenerateRequest(prompt="hi", sampling=pb.Sampling(temperature=1.0, n=2))
    request.stop.max_tokens = 3
    session = pb.SessionRequest(generate=pb.SessionGenerate(gen="g", request=request))
    # Field 1 the id, 3 the text, 5 streaming: a gateway's message without its classes.
    gateway = b"\x0a\x01r\x1a\x02hi\x28\x01"
    await asyncio.gather(
        frames(server, seen, m.JSON, seed), frames(server, seen, m.MSGPACK, seed + 1),
        bodies(server, seen, seed + 2), calls(server, seen, seed + 3),
        messages(server, seen, SESSION, session.SerializeToString(), seed + 4),
        messages(server, seen, GATEWAY, gateway, seed + 5),
    )  # fmt: skip


def test_streams_of_every_transport_are_not_touched_by_a_storm(tmp_path: Path) -> None:
    model = write_tiny_model_dir(tmp_path / "model")
    with start(model, tmp_path / "log", "--engine-process") as server:
        seen: collections.Counter[str] = collections.Counter()
        asyncio.run(storm(server, seen, 11))  # to warm up: threads, pools, first imports
        server.wait_idle()
        with balanced(server), ThreadPoolExecutor(4) as pool:
            wanted = answers(server, max_tokens=100)[0]
            over = False

            def go_on(transport: str) -> int:
                count, where = 0, address(server, transport)
                while not over:
                    asked = {**ASKED, "max_tokens": 100}
                    assert Stream(where, transport, **asked).whole() == wanted, transport
                    count += 1
                return count

            steady = [pool.submit(go_on, transport) for transport in TRANSPORTS]
            begun = time.monotonic()
            seen.clear()
            asyncio.run(storm(server, seen, 21))
            while time.monotonic() - begun < 1.0:
                time.sleep(0.1)
            over = True
            counts = [one.result(60) for one in steady]
        assert min(counts) >= 1, counts
        assert sum(seen.values()) > 1200, seen  # of some 1800 messages and 90 bodies
        assert seen["http 500"] == seen["grpc INTERNAL"] == seen["grpc UNKNOWN"] == 0, seen
        assert seen["http 400"] > 100 and seen["socket Error"] > 100, seen
        assert seen["grpc INVALID_ARGUMENT"] > 100, seen
        said = server.log.read_text()
        assert "Traceback" not in said and "ERROR" not in said, said[:3000]


def loops(path: Path) -> int:
    """How often the loops `for ... in range(N)` and `requests(N)` of a module's tests turn."""
    total = 0
    for test in ast.parse(path.read_text()).body:
        if not isinstance(test, ast.FunctionDef) or not test.name.startswith("test_"):
            continue
        twice = 2 if "codec" in {arg.arg for arg in test.args.args} else 1
        for node in ast.walk(test):
            if (
                isinstance(node, ast.For)
                and isinstance(node.iter, ast.Call)
                and isinstance(node.iter.func, ast.Name)
                and node.iter.func.id in ("range", "requests")
                and len(node.iter.args) == 1
                and isinstance(node.iter.args[0], ast.Constant)
            ):
                count = int(str(node.iter.args[0].value))
                total += twice * count if count >= 1000 else 0
    return total


def test_more_than_a_hundred_thousand_bad_inputs_are_tried() -> None:
    here = Path(__file__).parent / "api"
    assert loops(here / "test_bad_input.py") > 100_000
    assert loops(here / "test_grpc_fuzz.py") >= 150_000
