"""What fails behind the transports: stages of the engine, its process, the clock, the disk of logs.

And signals while every transport is busy. Each client gets an end it can understand, and what
stands afterwards answers as before. Faulty clients: test_faults.py.
"""

from __future__ import annotations

import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.api.processes import echo_server
from tests.api.test_process_server import children, gone
from tests.faulty import STAGES, bad, faulty_server
from tests.servers import TRANSPORTS, Server, refusal, start
from tests.streams import CUT, Stream
from tests.test_faults import ASKED, address, answers, balanced
from tests.tiny import write_tiny_model_dir

LATER = {"engine_error", "overloaded"}  # what an engine that restarts is told with
OVER = {"draining", "cancelled"}  # what a server that ends is told with


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


class Load:
    """Three clients per transport that ask again and again until `stop`."""

    def __init__(self, server: Server, wanted: tuple[str, str], **fields: Any) -> None:
        self.ends: Counter[str] = Counter()
        self._server, self._wanted, self._fields = server, wanted, {**ASKED, **fields}
        self._over = False
        self._pool = ThreadPoolExecutor(12)
        self._asking = [self._pool.submit(self._ask, one) for one in TRANSPORTS * 3]

    def _ask(self, transport: str) -> None:
        while not self._over:
            end, text = Stream(address(self._server, transport), transport, **self._fields).whole()
            if end == self._wanted[0]:
                assert text == self._wanted[1], transport
            else:
                assert self._wanted[1].startswith(text), transport
            self.ends[f"{transport} {end}"] += 1
            if end != self._wanted[0]:
                time.sleep(0.02)

    def stop(self) -> set[str]:
        """All ends there were; whatever a client asserted is raised."""
        self._over = True
        for asking in self._asking:
            asking.result(90)
        self._pool.shutdown()
        return {one.partition(" ")[2] for one in self.ends}

    def busy(self, least: int, within_s: float = 90.0) -> None:
        """Wait until each transport has had so many right answers."""
        end = time.monotonic() + within_s
        while min(self.ends[f"{one} {self._wanted[0]}"] for one in TRANSPORTS) < least:
            assert time.monotonic() < end, self.ends
            assert not any(asking.done() for asking in self._asking)
            time.sleep(0.02)


def test_a_stage_that_fails_costs_its_own_request_on_every_transport() -> None:
    """The clock on the wall jumps by days all the while, and no deadline moves."""
    with faulty_server() as server:
        with balanced(server), ThreadPoolExecutor(4) as pool:
            good = answers(server)[0]
            for stage in STAGES:
                prompt = bad(stage) + "the other the other "
                beside: list[Future[tuple[str, str]]] = []
                for transport in TRANSPORTS:
                    where = address(server, transport)
                    beside.append(pool.submit(Stream(where, transport, **ASKED).whole))
                    end, text = Stream(where, transport, **{**ASKED, "prompt": prompt}).whole()
                    assert (end, "injected" in text) == ("engine_error", False), (stage, transport)
                assert {one.result(60) for one in beside} == {good}, stage
            for transport in ("specserve.v1.json", "http"):
                where = address(server, transport)
                assert Stream(where, transport, timeout_s=20.0, **ASKED).whole() == good
                late = {**ASKED, "max_tokens": 900, "timeout_s": 0.05}
                assert Stream(where, transport, **late).whole()[0] == "timeout"
        server.process.send_signal(signal.SIGTERM)
        _, said = server.process.communicate(timeout=60)
        assert server.process.returncode == 0
        assert "injected" in said  # in the log, that is, and nowhere else


def test_a_killed_engine_process_under_load_of_every_transport(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path / "log", "--engine-process") as server:
        with balanced(server, 90.0):
            load = Load(server, answers(server)[0])
            load.busy(2)
            (child,) = children(server.process.pid)
            os.kill(child, signal.SIGKILL)
            end = time.monotonic() + 90
            while not gone(child) or ready(server) != 200:
                assert time.monotonic() < end
                assert ready(server, "/health") == 200
                time.sleep(0.05)
            # What ran must be told; the death may be noticed after all looked well once more.
            while not any(one.partition(" ")[2] in LATER for one in load.ends):
                assert time.monotonic() < end, load.ends
                time.sleep(0.05)
            load.ends.clear()
            load.busy(1)
            ends = load.stop()
            assert "length" in ends and ends <= {"length"} | LATER, load.ends
        assert "Traceback" not in server.log.read_text()


def ready(server: Server, path: str = "/ready") -> int:
    return httpx.get(server.http + path, timeout=60, trust_env=False, verify=False).status_code


def test_a_full_disk_for_logs_stops_nobody(model: Path) -> None:
    """Nothing can be written to standard error: /dev/full says there is no room."""
    with start(model, Path("/dev/full"), "--log-format", "json") as server:
        with balanced(server):
            for transport in TRANSPORTS:
                assert refusal(server, transport, prompt="")[0] == "invalid_request"
            httpx.get(server.http + "/nowhere", timeout=60, trust_env=False, verify=False)
        server.process.send_signal(signal.SIGHUP)  # is told in the log
        assert {end for end, _ in answers(server)} == {"length"}
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(60) == 0


@contextmanager
def serving(kind: str, model: Path, log: Path, drain_s: float) -> Iterator[Server]:
    """An echoing server that is slow, or the tiny model in a process of its own."""
    if kind == "echo":
        engine = {"pause": 0.005, "rows": 16}
        with echo_server(engine, drain_s=drain_s) as made:
            yield Server(made.process, made.ws, made.grpc, made.health, log)
    else:
        with start(model, log, "--engine-process", "--drain-s", str(drain_s)) as running:
            yield running


def left(server: Server) -> tuple[int, str]:
    """Exit code and log."""
    if server.process.stderr is None:
        return server.process.wait(90), server.log.read_text()
    _, said = server.process.communicate(timeout=90)
    return server.process.returncode, said


@pytest.mark.parametrize(("kind", "drain_s"), [("echo", 0.1), ("process", 20.0)])
def test_a_signal_under_load_gives_every_client_an_end(
    kind: str, drain_s: float, model: Path, tmp_path: Path
) -> None:
    """Answers are whole, or cancelled by name; who comes too late is told or finds no port."""
    with serving(kind, model, tmp_path / "log", drain_s) as server:
        engines = children(server.process.pid)
        load = Load(server, answers(server, max_tokens=120)[0], max_tokens=120)
        load.busy(1)
        server.process.send_signal(signal.SIGTERM)
        code, said = left(server)
        ends = load.stop()
        assert code == 0 and "Traceback" not in said, said[:3000]
        assert ends <= {"length", CUT} | OVER, load.ends
        assert all(gone(engine) for engine in engines)


@pytest.mark.parametrize("kind", ["echo", "process"])
def test_a_second_signal_under_load_ends_at_once(kind: str, model: Path, tmp_path: Path) -> None:
    with serving(kind, model, tmp_path / "log", 300.0) as server:
        engines = children(server.process.pid)
        assert len(engines) == (kind == "process")
        # The echo's take longer than the test; the tiny model may be through before the signal.
        length = 4000 if kind == "echo" else 120
        with ThreadPoolExecutor(1) as pool:
            where = address(server, "grpc")
            long = pool.submit(Stream(where, "grpc", **{**ASKED, "max_tokens": length}).whole)
            load = Load(server, answers(server, max_tokens=120)[0], max_tokens=120)
            load.busy(1)
            wait_for_drain(server)
            server.process.send_signal(signal.SIGTERM)
            code, said = left(server)
            ends = load.stop() | {long.result(90)[0]}
        assert code in ((1,) if kind == "echo" else (0, 1)) and "Traceback" not in said, said[:3000]
        assert ends <= {"length", CUT, "engine_error"} | OVER, load.ends
        until(lambda: all(gone(engine) for engine in engines))


def wait_for_drain(server: Server) -> None:
    server.process.send_signal(signal.SIGTERM)
    end = time.monotonic() + 60
    while time.monotonic() < end and server.process.poll() is None:
        try:
            if ready(server) == 503:
                return
        except httpx.HTTPError:
            return


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_a_frozen_server_process_goes_on_where_it_stood(model: Path, tmp_path: Path) -> None:
    """As a machine that slept: the clocks have moved on, and nobody has answered for a while."""
    with start(model, tmp_path / "log", "--engine-process") as server, balanced(server):
        load = Load(server, answers(server)[0])
        load.busy(1)
        everybody = [server.process.pid, *children(server.process.pid)]
        for one in everybody:
            os.kill(one, signal.SIGSTOP)
        time.sleep(0.7)
        for one in reversed(everybody):
            os.kill(one, signal.SIGCONT)
        load.ends.clear()
        load.busy(1)
        assert load.stop() == {"length"}
