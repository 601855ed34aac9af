"""Clients that vanish, dribble or do not read, on every transport of real server processes.

Each test ends with the books: descriptors, threads, rows and cache as before, the next answer
right. Cases 28 of the public bug reports. Engines and machines that fail: test_faults_inside.py.
"""

from __future__ import annotations

import random
import signal
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.processes import echo_server
from tests.servers import TRANSPORTS, Server, start
from tests.streams import CUT, Stream, relay
from tests.tiny import write_tiny_model_dir

ASKED: dict[str, Any] = {"prompt": "the other the other ", "max_tokens": 40, "ignore_eos": True}
ENDLESS: dict[str, Any] = {**ASKED, "max_tokens": 4000}


def address(server: Server, transport: str) -> str:
    """HOST:PORT of what speaks a transport."""
    return server.grpc if transport == "grpc" else server.http.partition("://")[2].rstrip("/")


def stats(server: Server) -> Any:
    url = server.http + "/server_info"
    return httpx.get(url, timeout=60, trust_env=False, verify=False).json()["stats"]


def held(server: Server) -> tuple[int, int]:
    """Open descriptors and threads of the server."""
    folder = Path(f"/proc/{server.process.pid}")
    threads = (folder / "status").read_text().partition("Threads:")[2].split()[0]
    return len(list((folder / "fd").iterdir())), int(threads)


def answers(server: Server, **fields: Any) -> list[tuple[str, str]]:
    """End and text over each transport."""
    fields = {**ASKED, **fields}
    return [Stream(address(server, one), one, **fields).whole() for one in TRANSPORTS]


@contextmanager
def balanced(server: Server, within_s: float = 60.0) -> Iterator[None]:
    """What runs in the block leaves nothing behind, and the answers after it are as before."""
    wanted = answers(server)
    assert len(set(wanted)) == 1 and wanted[0][0] == "length", wanted
    answers(server)
    before = held(server)
    yield
    end = time.monotonic() + within_s
    while True:
        now, after = stats(server), held(server)
        rest = now["running"] + now["waiting"]
        if not rest and now["kv_used"] == 0 and after[0] <= before[0] + 1:
            break
        assert time.monotonic() < end, (now, before, after)
        time.sleep(0.05)
    assert after[1] <= before[1] + 4, (before, after)
    assert answers(server) == wanted
    assert server.process.poll() is None


@pytest.fixture(scope="module", params=["echo", "tiny, engine in a process"])
def server(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    place = tmp_path_factory.mktemp("server")
    with ExitStack() as stack:
        if request.param == "echo":
            made = stack.enter_context(echo_server({"pause": 0.002, "rows": 16}))
            running = Server(made.process, made.ws, made.grpc, made.health, place)
        else:
            model = write_tiny_model_dir(place / "model")
            running = stack.enter_context(start(model, place / "log", "--engine-process"))
        yield running
        running.process.send_signal(signal.SIGTERM)
        if request.param == "echo":
            code, said = made.ended()
        else:
            code, said = running.process.wait(60), running.log.read_text()
        assert code == 0 and "Traceback" not in said and "ERROR" not in said, said[:3000]


@pytest.mark.parametrize("reset", [False, True], ids=["FIN", "RST"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_case_28_clients_vanish_at_every_event(server: Server, transport: str, reset: bool) -> None:
    """Before the first, at each of the first ten, and beside others that stay."""
    where = address(server, transport)

    def vanish(pieces: int) -> None:
        with relay(where) as broken:
            stream = Stream(broken.address, transport, **ENDLESS)
            asking = iter(stream)
            if pieces == 0:
                with ThreadPoolExecutor(1) as pool:
                    begun = pool.submit(next, asking, "")
                    time.sleep(0.02)
                    broken.cut(reset)
                    begun.result(30)
            else:
                for _ in range(pieces):
                    next(asking, "")  # a client that is late gets fewer and larger ones
                broken.cut(reset)
            for _ in asking:
                pass
            assert stream.end == CUT or "context" in stream.end or stream.end == "length"

    with balanced(server):
        before = stats(server)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(vanish, range(11)))
        end = time.monotonic() + 60
        while (now := stats(server))["running"] + now["waiting"]:
            assert time.monotonic() < end, now
            time.sleep(0.02)
        begun = now["requests"] - before["requests"]
        ended = now["finished"] - before["finished"]
        assert begun == ended or now["aborted"] - before["aborted"] == begun, (before, now)
        assert 10 <= begun <= 11 and now["aborted"] > before["aborted"]


def test_who_does_not_read_or_has_died_is_given_up_on(tmp_path: Path) -> None:
    """Frozen connections: the server sees a peer that takes nothing and says nothing."""
    engine = {"pause": 0.0, "run": 8, "rows": 32, "context": 1 << 22}
    with echo_server(engine) as running, ExitStack() as stack:
        server = Server(running.process, running.ws, running.grpc, running.health, tmp_path)
        with balanced(server, 90.0):
            frozen = {"prompt": "x" * 2000, "ignore_eos": True, "max_tokens": 1 << 21}
            for transport in TRANSPORTS:
                broken = stack.enter_context(relay(address(server, transport)))
                more = {"logprobs": 20}
                asking = iter(Stream(broken.address, transport, **frozen, **more))
                stack.callback(asking.close)  # type: ignore[attr-defined]
                next(asking)
                broken.freeze()
            assert answers(server)[0][0] == "length"
            end = time.monotonic() + 90
            while stats(server)["running"]:
                assert time.monotonic() < end
                time.sleep(0.1)
            stack.close()


def heads(chance: random.Random) -> bytes:
    """A request's head that is far too large, or is no end of one."""
    line = b"GET /health HTTP/1.1\r\nHost: localhost\r\n"
    return chance.choice(
        [
            line + b"X-Long: " + b"a" * (200 << 10) + b"\r\n\r\n",
            line + b"".join(b"X-%d: a\r\n" % i for i in range(2000)) + b"\r\n",
            b"GET /" + b"a" * (200 << 10) + b" HTTP/1.1\r\n\r\n",
            b"GET /v1/stream HTTP/1.1\r\nUpgrade: websocket\r\nX: " + b"a" * (200 << 10),
            b"A" * (200 << 10),
        ]
    )


def test_slow_and_giant_heads_keep_nobody_waiting(server: Server) -> None:
    """150 connections that dribble, 60 with giant heads; others are answered meanwhile."""
    chance = random.Random(3)
    with balanced(server), ExitStack() as stack:
        slow = []
        for i in range(150):
            host, _, port = address(server, "grpc" if i % 3 == 0 else "http").rpartition(":")
            slow.append(stack.enter_context(socket.create_connection((host, int(port)), 60)))
        begun = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\n{"
        told: list[bytes] = []
        for turn in range(30):
            for i, one in enumerate(slow):
                data = begun if i % 3 else b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
                one.sendall(data[turn : turn + 1])
            if turn % 10 == 0:
                assert {end for end, _ in answers(server)} == {"length"}
            host, _, port = address(server, "http").rpartition(":")
            for _ in range(2):
                with socket.create_connection((host, int(port)), 60) as giant:
                    try:
                        giant.sendall(heads(chance))
                        told.append(giant.recv(100))
                    except OSError:
                        told.append(b"")
        status = {answer[9:12] for answer in told if answer}
        assert len(told) == 60 and status <= {b"431", b"400", b"414"}, status


def test_open_connections_that_say_nothing_do_not_keep_the_server(tmp_path: Path) -> None:
    with echo_server({"pause": 0.002}) as running, ExitStack() as stack:
        server = Server(running.process, running.ws, running.grpc, running.health, tmp_path)
        for i in range(60):
            host, _, port = address(server, TRANSPORTS[i % 4]).rpartition(":")
            stack.enter_context(socket.create_connection((host, int(port)), 60))
        assert {end for end, _ in answers(server)} == {"length"}
        server.process.send_signal(signal.SIGTERM)
        code, said = running.ended()
        assert code == 0 and "Traceback" not in said, said
