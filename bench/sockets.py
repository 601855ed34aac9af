"""What the server itself costs per WebSocket message, against bare picows with the same bytes.

An engine that computes nothing ticks in its own thread; one message per socket and tick. The whole
server and a bare picows server stand in one process and take turns; their clients are another
process. "push": bare picows sends ready bytes at each tick. "echo": it sends back what its clients
send at each tick. CPU is that of the loop's thread. Latency: from the end of a step to the bytes at
a client, by the machine's monotonic clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import picows
import uvloop

from spec_serve.api import messages as m
from spec_serve.api.server import Server
from spec_serve.api.server_settings import ServeSettings
from spec_serve.bench.faked import ByteText, Ticking, age_us, stamp
from spec_serve.bench.report import table, write_json

PATH = "/v1/stream"
SUBPROTOCOL = "Sec-WebSocket-Protocol"


@dataclass(slots=True)
class Phase:
    """One measurement. cpu_us: of the loop's thread, per message."""

    cpu_us: float
    messages: int


class Bare:
    """picows and nothing else: every tick the same bytes to each of its sockets."""

    def __init__(self, tick: float, kind: picows.WSMsgType) -> None:
        self.sockets: list[picows.WSTransport] = []
        self.frame = bytearray()
        self.sent = 0
        self.kind, self._tick = kind, tick
        self._on = threading.Event()
        self._over = False
        self._server: asyncio.Server | None = None
        self._thread = threading.Thread(target=self._run)

    async def start(self) -> int:
        """Listen; the port."""
        bare = self

        class Listener(picows.WSListener):
            def on_ws_connected(self, transport: picows.WSTransport) -> None:
                bare.sockets.append(transport)

            def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
                if frame.msg_type == bare.kind:
                    transport.send(bare.kind, frame.get_payload_as_memoryview())
                    bare.sent += 1

        self._server = await picows.ws_create_server(lambda request: Listener(), "127.0.0.1", 0)
        self._loop = asyncio.get_running_loop()
        self._thread.start()
        return int(self._server.sockets[0].getsockname()[1])

    def go(self, on: bool) -> None:
        """Send, or rest."""
        if on:
            self._on.set()
        else:
            self._on.clear()

    async def stop(self) -> None:
        """End thread and sockets."""
        self._over = True
        self._on.set()
        await self._loop.run_in_executor(None, self._thread.join)
        for transport in self.sockets:
            transport.disconnect(False)
        if self._server is not None:
            self._server.close()

    def _run(self) -> None:
        while not self._over:
            self._on.wait()
            time.sleep(self._tick)
            if self._on.is_set() and not self._over:
                self._loop.call_soon_threadsafe(self._deliver, list(self.sockets), stamp())

    def _deliver(self, sockets: list[picows.WSTransport], stamped: int) -> None:
        kind, frame = self.kind, self.frame
        frame[-4:] = stamped.to_bytes(4, "big")
        for transport in sockets:
            transport.send_reuse_external_bytearray(kind, frame, 14)
        self.sent += len(sockets)


class Reader(picows.WSListener):
    """A client that keeps what came when, and looks at it later."""

    heard: list[tuple[bytes, int]] = []

    def on_ws_connected(self, transport: picows.WSTransport) -> None:
        self.transport = transport

    def on_ws_frame(self, transport: picows.WSTransport, frame: picows.WSFrame) -> None:
        Reader.heard.append((frame.get_payload_as_bytes(), stamp()))


def ages(codec: m.Codec, bare: bool) -> dict[str, Any]:
    """How old messages were when they came, in microseconds; the last frame, in hex."""
    found: list[int] = []
    last = b""
    for payload, now in Reader.heard:
        if bare:
            found.append(age_us(int.from_bytes(payload[-4:], "big"), now))
            continue
        message = codec.server_message(payload)
        if isinstance(message, m.Delta) and message.steps:
            found.append(age_us(message.steps[-1].host_us, now))
            last = payload
    return {"p50": median(found or [0]), "frame": last.hex()}


async def clients(ours: int, bare: int, sockets: int, codec: str) -> None:
    """The other process: takes commands on standard input, reports on standard output."""
    spoken = m.Codec(codec)
    kind = picows.WSMsgType.TEXT if spoken.text else picows.WSMsgType.BINARY
    loop = asyncio.get_running_loop()
    held: dict[str, list[Any]] = {"ours": [], "bare": []}
    for _ in range(sockets if bare else 0):
        held["bare"].append(await picows.ws_connect(Reader, f"ws://127.0.0.1:{bare}/"))
    echoing: asyncio.Task[None] | None = None
    while True:
        line = await loop.run_in_executor(None, sys.stdin.readline)
        if not line:
            return
        if line == "ours\n":
            for number in range(sockets):
                transport, reader = await picows.ws_connect(
                    Reader, f"ws://127.0.0.1:{ours}{PATH}", extra_headers={SUBPROTOCOL: codec}
                )
                request = m.Generate(f"g{number}", prompt="x", ignore_eos=True, max_tokens=1 << 19)
                transport.send(kind, spoken.encode(request))
                held["ours"].append((transport, reader))
        elif line == "leave\n":
            for transport, _ in held["ours"]:
                transport.send_close(picows.WSCloseCode.OK)
                transport.disconnect()
            held["ours"].clear()
        elif line.startswith("echo "):
            _, tick, frame = line.split()
            bares = [transport for transport, _ in held["bare"]]
            echoing = asyncio.create_task(_ask(bares, float(tick), kind, bytes.fromhex(frame)))
        elif line == "quiet\n" and echoing is not None:
            echoing.cancel()
        elif line == "clear\n":
            Reader.heard.clear()
        elif line in ("ages\n", "bare ages\n"):
            sys.stdout.write(json.dumps(ages(spoken, line.startswith("bare"))) + "\n")
            sys.stdout.flush()


async def _ask(
    sockets: list[picows.WSTransport], tick: float, kind: picows.WSMsgType, frame: bytes
) -> None:
    """Send the same on all sockets, every tick."""
    while True:
        for transport in sockets:
            transport.send(kind, frame)
        await asyncio.sleep(tick)


class Other:
    """The process with the clients, from our side."""

    def __init__(self, arguments: Sequence[str]) -> None:
        command = [sys.executable, "-c", f"from {__name__} import main; main({list(arguments)})"]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def tell(self, word: str) -> None:
        """A command without an answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()

    async def ask(self, word: str) -> dict[str, Any]:
        """A command with one."""
        self.tell(word)
        stdout = self._process.stdout
        assert stdout is not None
        line = await asyncio.get_running_loop().run_in_executor(None, stdout.readline)
        found: dict[str, Any] = json.loads(line)
        return found

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(10)
        self._process.stdout.close()


async def spent(seconds: float, count: Callable[[], int]) -> Phase:
    """CPU of this thread per message while this many seconds pass."""
    await asyncio.sleep(0.3)
    cpu, sent = time.thread_time(), count()
    await asyncio.sleep(seconds)
    cpu, sent = time.thread_time() - cpu, count() - sent
    return Phase(cpu / max(sent, 1) * 1e6, sent)


async def cost(args: argparse.Namespace) -> dict[str, Any]:
    """Rounds of bare and ours in turn; microseconds of CPU per message, and the ratio."""
    engine = Ticking(args.tick / 1e3, args.tokens)
    settings = ServeSettings(
        port=0, grpc_port=None, model_name="faked", generation_config={}, max_queue=0
    )
    server = Server(engine, ByteText(), settings)
    codec = m.Codec(args.codec)
    bare = Bare(args.tick / 1e3, picows.WSMsgType.TEXT if codec.text else picows.WSMsgType.BINARY)
    await server.start()
    port = await bare.start()
    other = Other(["--clients", str(server.port), str(port), str(args.sockets), args.codec])
    rounds: list[dict[str, float]] = []
    try:
        while len(bare.sockets) < args.sockets:
            await asyncio.sleep(0.02)
        for number in range(args.rounds):
            other.tell("clear")
            other.tell("ours")
            while server.link.idle() or len(server.app.sessions) < args.sockets:
                await asyncio.sleep(0.02)
            ours = await spent(args.seconds, lambda: engine.stats().steps * args.sockets)
            told = await other.ask("ages")
            other.tell("leave")
            while server.app.sessions or not server.link.idle():
                await asyncio.sleep(0.02)
            frame = bytes.fromhex(told["frame"])
            bare.frame = bytearray(14) + frame
            bare.go(True)
            other.tell("clear")
            plain = await spent(args.seconds, lambda: bare.sent)
            bare.go(False)
            late = await other.ask("bare ages")
            other.tell(f"echo {args.tick / 1e3} {told['frame']}")
            echo = await spent(args.seconds, lambda: bare.sent)
            other.tell("quiet")
            await asyncio.sleep(0.1)
            rounds.append(
                {
                    "round": number + 1, "bytes": len(frame), "ours us": ours.cpu_us,
                    "push us": plain.cpu_us, "to push": ours.cpu_us / plain.cpu_us,
                    "echo us": echo.cpu_us, "to echo": ours.cpu_us / echo.cpu_us,
                    "p50 us": float(told["p50"]), "push p50 us": float(late["p50"]),
                }
            )  # fmt: skip
    finally:
        other.end()
        await bare.stop()
        await server.close()
    middle = {name: median(one[name] for one in rounds) for name in rounds[0] if name != "round"}
    table([*rounds, {"round": "median", **middle}])
    return {"rounds": rounds, **{f"median {name}": value for name, value in middle.items()}}


def main(argv: Sequence[str]) -> int:
    """Entry point; 0."""
    if argv and argv[0] == "--clients":
        ours, bare, sockets = (int(word) for word in argv[1:4])
        uvloop.run(clients(ours, bare, sockets, argv[4]))
        return 0
    parser = argparse.ArgumentParser("spec-serve bench sockets", description=__doc__)
    parser.add_argument("--sockets", type=int, default=50)
    parser.add_argument("--tick", type=float, default=20.0, help="milliseconds between steps")
    parser.add_argument("--tokens", type=int, default=3, help="per step and socket")
    parser.add_argument("--codec", choices=m.SUBPROTOCOLS, default=m.MSGPACK)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="per round and server")
    parser.add_argument("--json", default="", help="where to write the figures")
    args = parser.parse_args(argv)
    write_json(args.json, uvloop.run(cost(args)))
    return 0
