"""What a message costs over gRPC: the server's CPU time, and the time from a step to its reader.

A server in a process of its own around an engine that costs nothing; this process reads all
streams. Latency holds the reader's own cost too. Prints a table and can write JSON; the times are
wall-clock, so other work on the machine shows in them, while CPU time is the process's own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import grpc

from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.bench.faked import ByteText, Ticking, age_us
from spec_serve.bench.report import table, write_json


def serve(tick: float, tokens: int) -> int:
    """The server's process: says its address, and its CPU seconds for every line it reads."""
    from spec_serve.api.server import run_server
    from spec_serve.api.server_settings import ServeSettings

    settings = ServeSettings(port=0, grpc_port=0, generation_config={}, max_queue=0, page=False)

    def ready(addresses: list[str]) -> None:
        loop = asyncio.get_running_loop()

        def asked() -> None:
            if not sys.stdin.readline():
                loop.remove_reader(sys.stdin.fileno())
                return
            print(time.process_time(), flush=True)

        loop.add_reader(sys.stdin.fileno(), asked)
        print(json.dumps(addresses), flush=True)

    return run_server(Ticking(tick, tokens), ByteText(), settings, ready)


class Child:
    """The server's process, ended when the block is left."""

    def __init__(self, tick: float, tokens: int) -> None:
        command = [sys.executable, "-m", "spec_serve.bench.rpc", "--serve"]
        command += ["--tick-ms", str(tick * 1e3), "--tokens", str(tokens)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)

    def __enter__(self) -> Child:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
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


async def read(stub: Any, messages: int, tokens: int, ages: list[int]) -> int:
    """One stream to its end; the messages it had."""
    request = pb.GenerateRequest(
        prompt="go", stop=pb.Stop(max_tokens=messages * tokens), output=pb.Output(token_ids=True)
    )
    count = 0
    async for event in stub.Generate(request):
        count += 1
        if event.HasField("delta"):
            ages.append(age_us(event.delta.steps[0].host_us))
    return count


async def measure(child: Child, streams: int, messages: int, tokens: int) -> dict[str, Any]:
    """Read `streams` streams of so many messages at once."""
    ages: list[int] = []
    async with grpc.aio.insecure_channel(child.address) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)  # type: ignore[no-untyped-call]
        await read(stub, 5, tokens, [])
        before = child.cpu_s()
        counts = await asyncio.gather(
            *(read(stub, messages, tokens, ages) for _ in range(streams))
        )
        used = child.cpu_s() - before
    ages.sort()
    return {
        "streams": streams,
        "messages": sum(counts),
        "cpu us/msg": used / sum(counts) * 1e6,
        "p50 us": ages[len(ages) // 2],
        "p90 us": ages[len(ages) * 9 // 10],
        "p99 us": ages[len(ages) * 99 // 100],
    }


def main(argv: Sequence[str]) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(prog="spec-serve bench rpc", description=__doc__)
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 50])
    parser.add_argument("--tick-ms", type=float, default=20.0, help="between steps")
    parser.add_argument("--tokens", type=int, default=4, help="per step and stream")
    parser.add_argument("--messages", type=int, default=100, help="per stream")
    parser.add_argument("--json", default="", help="file for the numbers")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.serve:
        return serve(args.tick_ms / 1e3, args.tokens)
    rows = []
    with Child(args.tick_ms / 1e3, args.tokens) as child:
        for streams in args.streams:
            rows.append(asyncio.run(measure(child, streams, args.messages, args.tokens)))
    table(rows)
    write_json(args.json, {"bench": "rpc", "rows": rows})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
