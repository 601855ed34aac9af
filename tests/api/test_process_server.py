"""A whole server with its engine in a process of its own: same tokens, killed engines, ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from spec_serve.api import messages as m
from tests.engines import engine, tokens
from tests.servers import TRANSPORTS, Server, ask, refusal, start
from tests.test_end_to_end import TOKENS
from tests.tiny import write_tiny_model_dir

PROMPT = "the other the other"
ASKED: dict[str, Any] = {"prompt": PROMPT, "max_tokens": 32, "ignore_eos": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model_dir(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def server(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("log") / "server.log"
    with start(model, log, "--engine-process") as running:
        yield running


def children(parent: int) -> list[int]:
    """Processes started by `parent` that still run."""
    found = []
    for place in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = place.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] != "Z":
            found.append(int(place.parent.name))
    return found


def gone(process: int) -> bool:
    try:
        return "Z" in Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return True


def ready(server: Server, path: str = "/ready") -> int:
    """The status of a path."""
    try:
        with urllib.request.urlopen(server.health.replace("/health", path), timeout=60) as got:
            return int(got.status)
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def completion(server: Server) -> tuple[int, str]:
    """Status and body of an ordinary HTTP request."""
    asked = json.dumps({"model": "tiny", "prompt": PROMPT, "max_tokens": 32}).encode()
    kind = {"content-type": "application/json"}
    where = server.health.replace("/health", "/v1/completions")
    try:
        with urllib.request.urlopen(urllib.request.Request(where, asked, kind), timeout=60) as got:
            return int(got.status), got.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def wait(true: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("mode", ["off", "max"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_the_same_tokens_as_without(server: Server, transport: str, mode: str) -> None:
    got = ask(server, transport, mode=mode, **ASKED)
    wanted = tokens(engine("none"), TOKENS.encode(PROMPT), 32)
    assert got.ids == wanted and got.text == TOKENS.decode(wanted)
    assert (got.reason, got.counted) == ("length", 32)
    assert got.accepted >= 16 if mode == "max" else got.drafted == 0


def test_stop_strings_and_counters(server: Server) -> None:
    plain = ask(server, m.JSON, **ASKED)
    stop = plain.text[8:11]
    before = server.wait_idle()
    got = ask(server, m.JSON, stop=[stop], **ASKED)
    assert got.matched == stop and got.text == plain.text[: plain.text.index(stop)]
    after = server.wait_idle()
    assert after.requests == before.requests + 1
    assert after.tokens_out == before.tokens_out + got.counted


def test_the_server_has_no_torch(server: Server) -> None:
    (child,) = children(server.process.pid)
    assert "libtorch" in Path(f"/proc/{child}/maps").read_text()
    assert "libtorch" not in Path(f"/proc/{server.process.pid}/maps").read_text()


def test_a_killed_engine_costs_its_requests_and_no_socket(server: Server) -> None:
    plain = ask(server, m.JSON, **ASKED)
    codec = m.Codec(m.JSON)

    with connect(server.ws, subprotocols=[Subprotocol(m.JSON)], proxy=None) as socket:

        def told() -> Any:
            return codec.server_message(socket.recv(60))

        def generate(gen: str, **fields: Any) -> None:
            frame = codec.encode({"type": "generate", "gen": gen, **ASKED, **fields})
            socket.send(frame.decode())

        assert isinstance(told(), m.Hello)
        (child,) = children(server.process.pid)
        server.wait_idle()
        os.kill(child, signal.SIGSTOP)
        for gen in ("a", "b"):
            generate(gen)
        with ThreadPoolExecutor() as pool:
            call = pool.submit(refusal, server, "grpc", **ASKED)
            web = pool.submit(completion, server)
            wait(lambda: server.stats().waiting == 4)
            os.kill(child, signal.SIGKILL)
            code, _, said = call.result(60)
            assert code == "engine_error" and "restarting" in said
            status, body = web.result(60)
            assert status >= 500 and "restarting" in body
        for gen in ("a", "b"):
            error = told()
            assert isinstance(error, m.Error) and error.gen == gen
            assert (error.code, error.retryable) == ("engine_error", True)
            assert "restarting" in error.message and error.retry_after_ms > 0
        assert ready(server) == 503 and ready(server, "/health") == 200
        generate("c")
        error = told()
        assert isinstance(error, m.Error) and error.gen == "c" and error.retryable
        wait(lambda: ready(server) == 200)
        generate("d", ids=True)
        ids: list[int] = []
        while not isinstance(message := told(), m.Finished):
            ids += message.ids if isinstance(message, m.Delta) else []
        assert message.gen == "d" and ids == plain.ids
    assert children(server.process.pid) != [child]
    assert ask(server, "grpc", **ASKED).ids == plain.ids


@pytest.mark.parametrize("flags", [(), ("--engine-process",)])
def test_what_can_not_be_loaded_ends_alike(flags: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "tokenizer.json").write_text("not JSON")
    command = [
        sys.executable, "-P", "-m", "spec_serve.api.cli", "--target", str(tmp_path),
        "--port", "0", "--grpc-port", "off", "--quiet", *flags,
    ]  # fmt: skip
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert ran.returncode == 1 and ran.stdout == ""
    said = [line for line in ran.stderr.splitlines() if line]
    assert len(said) == 1 and said[0].startswith("spec-serve: error: ")
    assert str(tmp_path / "tokenizer.json") in said[0]


def test_a_signal_to_all_drains(model: Path, tmp_path: Path) -> None:
    with start(model, tmp_path / "log", "--engine-process") as server:
        (child,) = children(server.process.pid)
        for process in (child, server.process.pid):  # as service managers do
            os.kill(process, signal.SIGTERM)
        assert server.process.wait(60) == 0
        assert gone(child)
        assert server.log.read_text() == ""
