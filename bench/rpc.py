"""What a message costs over gRPC: the server's CPU time, and the time from a step to the socket.

A server in a process of its own around an engine that costs nothing, beside a bare grpc.aio server
that sends a message of the same size at the same pace. `cpu` is process time per message with all
streams read by a grpc client; `p50` and on are microseconds from a step's end to its message on a
loopback socket, read without a client library, on one stream of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from typing import Any

import grpc
import uvloop

from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.bench.faked import ByteText, Ticking, age_us, stamp
from spec_serve.bench.http2 import Call
from spec_serve.bench.report import table, write_json

PATH = "/specserve.v1.SpecServe/Generate"


def _usual(tokens: int) -> pb.GenerateEvent:
    source = pb.SpecSource(name="lookup", drafted=tokens, accepted=tokens - 1)
    step = pb.SpecStep(
        step=1, drafted=tokens, accepted=tokens - 1, sources=[source], draft_us=900, verify_us=9000
    )
    delta = pb.Delta(text="x" * tokens, token_ids=[100] * tokens, steps=[step])
    return pb.GenerateEvent(seq=100, delta=delta)


class Bare(pb_grpc.SpecServeServicer):
    """Sends one message over and over: what grpc.aio alone costs."""

    def __init__(self, tick: float, tokens: int) -> None:
        self._wakes: set[asyncio.Event] = set()
        self._tick, self._tokens = tick, tokens
        self._loop = asyncio.get_running_loop()
        self._now = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        while True:
            self._loop.call_soon_threadsafe(self._step, stamp())
            time.sleep(self._tick)

    def _step(self, now: int) -> None:
        self._now = now
        for wake in self._wakes:
            wake.set()

    async def Generate(self, request: pb.GenerateRequest, context: Any) -> None:
        """As many messages as tokens are asked for."""
        wake, event = asyncio.Event(), _usual(self._tokens)
        step = event.delta.steps[0]
        self._wakes.add(wake)
        try:
            for _ in range(request.stop.max_tokens // self._tokens):
                await wake.wait()
                wake.clear()
                step.host_us = self._now
                await context.write(event)
        finally:
            self._wakes.discard(wake)


async def serve_bare(tick: float, tokens: int) -> int:
    """A server of `Bare` until standard input ends."""
    server = grpc.aio.server()
    add = pb_grpc.add_SpecServeServicer_to_server
    add(Bare(tick, tokens), server)  # type: ignore[no-untyped-call]
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    ended = asyncio.Event()
    _answer_questions([f"grpc://127.0.0.1:{port}"], ended.set)
    await ended.wait()
    await server.stop(0)
    return 0


def _answer_questions(addresses: list[str], end: Any) -> None:
    """Say the addresses, then our CPU seconds for every line read."""
    loop = asyncio.get_running_loop()

    def asked() -> None:
        if not sys.stdin.readline():
            loop.remove_reader(sys.stdin.fileno())
            end()
            return
        print(time.process_time(), flush=True)

    loop.add_reader(sys.stdin.fileno(), asked)
    print(json.dumps(addresses), flush=True)


def serve(tick: float, tokens: int) -> int:
    """The whole server, with an engine that ticks."""
    from spec_serve.api.server import run_server
    from spec_serve.api.server_settings import ServeSettings

    made = ServeSettings(port=0, grpc_port=0, generation_config={}, max_queue=0, page=False)

    def ready(addresses: list[str]) -> None:
        _answer_questions(addresses, lambda: None)

    return run_server(Ticking(tick, tokens), ByteText(), made, ready)


class Child:
    """A server's process, ended when the block is left. kind: "server" or "bare"."""

    def __init__(self, kind: str, tick_ms: float, tokens: int) -> None:
        command = [sys.executable, "-m", "spec_serve.bench.rpc", "--serve", kind]
        command += ["--tick-ms", str(tick_ms), "--tokens", str(tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Child:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait(10)
            raise RuntimeError("the server's process did not start")
        addresses = json.loads(line)
        self.address = next(a.removeprefix("grpc://") for a in addresses if "grpc:" in a)
        return self

    def cpu_s(self) -> float:
        """CPU seconds it has used."""
        stdin, stdout = self._process.stdin, self._process.stdout
        assert stdin is not None and stdout is not None
        stdin.write("\n")
        stdin.flush()
        return float(stdout.readline())

    def __exit__(self, *exc: object) -> None:
        self._process.terminate()
        try:
            self._process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.communicate()


def request(messages: int, tokens: int) -> pb.GenerateRequest:
    """For so many messages."""
    stop, output = pb.Stop(max_tokens=messages * tokens), pb.Output(token_ids=True)
    return pb.GenerateRequest(prompt="go", stop=stop, output=output)


async def cpu_us(child: Child, streams: int, messages: int, tokens: int) -> float:
    """CPU microseconds per message with so many streams at once."""
    async with grpc.aio.insecure_channel(child.address) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)  # type: ignore[no-untyped-call]

        async def read(count: int) -> int:
            got = 0
            async for _ in stub.Generate(request(count, tokens)):
                got += 1
            return got

        await read(5)
        before = child.cpu_s()
        counts = await asyncio.gather(*(read(messages) for _ in range(streams)))
        return (child.cpu_s() - before) / sum(counts) * 1e6


def ages_us(child: Child, messages: int, tokens: int) -> list[int]:
    """Microseconds from the end of each step to its message on the socket, in order of size."""
    call = Call(child.address, PATH, request(messages, tokens).SerializeToString())
    found = []
    for data in call.messages():
        now = stamp()
        event = pb.GenerateEvent.FromString(data)
        if event.HasField("delta"):
            found.append(age_us(event.delta.steps[0].host_us, now))
    call.close()
    return sorted(found)


def measure(kind: str, args: argparse.Namespace) -> dict[str, Any]:
    """One line of the table."""
    with Child(kind, args.tick_ms, args.tokens) as child:
        cost = asyncio.run(cpu_us(child, args.streams, args.messages, args.tokens))
        ages = ages_us(child, args.messages, args.tokens)
    at = {name: ages[len(ages) * part // 100] for name, part in (("p50", 50), ("p90", 90))}
    return {"server": kind, "streams": args.streams, "cpu us/msg": cost, **at}


def main(argv: Sequence[str]) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="spec-serve bench rpc", description=__doc__)
    parser.add_argument("--streams", type=int, default=50, help="at once, for CPU time")
    parser.add_argument("--tick-ms", type=float, default=20.0, help="between steps")
    parser.add_argument("--tokens", type=int, default=4, help="per step and stream")
    parser.add_argument("--messages", type=int, default=100, help="per stream")
    parser.add_argument("--repeat", type=int, default=1, help="rounds, server and bare in turn")
    parser.add_argument("--json", default="", help="file for the numbers")
    parser.add_argument("--serve", choices=("server", "bare"), help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve == "server":
        return serve(args.tick_ms / 1e3, args.tokens)
    if args.serve == "bare":
        return uvloop.run(serve_bare(args.tick_ms / 1e3, args.tokens))
    rows = [measure(kind, args) for _ in range(args.repeat) for kind in ("bare", "server")]
    table(rows)
    write_json(args.json, {"bench": "rpc", "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
