"""Keys and bounds through every door of one server process: HTTP, WebSocket and gRPC alike."""

from __future__ import annotations

import asyncio
import base64
import http.client
import json
import re
import resource
import signal
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from smg_grpc_proto.generated import vllm_engine_pb2 as vllm
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

from spec_serve.api import grpc_guard
from spec_serve.api import messages as m
from spec_serve.api.auth import hashed
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from tests.api.processes import Running, echo_server
from tests.api.serving import served

ALICE, BOB, ROOT_KEY = "alice-" + "a" * 32, "bob-" + "b" * 32, "root-" + "r" * 32


def ask(server: Running, method: str, path: str, key: str = "", body: object = None) -> Any:
    """The status, the headers and the body of an HTTP answer."""
    host = server.health.partition("://")[2].partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=60)
    head = {"Authorization": f"Bearer {key}"} if key else {}
    try:
        sent = None if body is None else json.dumps(body)
        connection.request(method, path, sent, {**head, "Content-Type": "application/json"})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def completion(server: Running, key: str = "", **fields: Any) -> Any:
    body = {"model": "echo", "prompt": "hello", "max_tokens": 20, **fields}
    return ask(server, "POST", "/v1/completions", key, body)


def by_socket(server: Running, key: str = "", **fields: Any) -> m.Error | m.Finished:
    """How a generation over the WebSocket ends."""
    codec = m.Codec(m.JSON)
    names = [Subprotocol(m.JSON)]
    if key:
        wrapped = base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")
        names.append(Subprotocol(f"specserve.key.{wrapped}"))
    with connect(server.ws, subprotocols=names, proxy=None) as opened:
        made = codec.encode({"type": "generate", "gen": "g", "prompt": "hello", **fields})
        opened.send(made.decode())
        while True:
            message = codec.server_message(opened.recv(60))
            if isinstance(message, (m.Error, m.Finished)):
                return message


class Refused(Exception):
    """A gRPC status: its name, its reason and when to come back, in seconds."""

    def __init__(self, error: grpc.RpcError) -> None:
        self.name = error.code().name
        self.reason, self.retry = "", 0.0
        status = rpc_status.from_call(error)
        for packed in status.details if status is not None else ():
            info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
            if packed.Unpack(info):
                self.reason = info.reason
            elif packed.Unpack(retry):
                self.retry = retry.retry_delay.ToTimedelta().total_seconds()


def by_grpc(server: Running, key: str = "", **fields: Any) -> str:
    """The text; Refused."""
    metadata = [("authorization", f"Bearer {key}")] if key else []
    with grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        request = pb.GenerateRequest(**{"prompt": "hello", **fields})
        try:
            events = list(stub.Generate(request, timeout=60, metadata=metadata))
        except grpc.RpcError as error:
            raise Refused(error) from None
    return "".join(event.delta.text for event in events if event.HasField("delta"))


@contextmanager
def guarded(tmp_path: Path, **settings: Any) -> Iterator[Running]:
    file = tmp_path / "keys"
    file.write_text(f"alice:{hashed(ALICE)}\nbob:{hashed(BOB)}\n")
    engine = settings.pop("engine", None)
    with echo_server(engine, api_key_file=str(file), admin_key=ROOT_KEY, **settings) as server:
        yield server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with guarded(tmp_path_factory.mktemp("keys")) as running:
        yield running


def test_every_route_but_three_asks_for_a_key() -> None:
    async def routes() -> list[Any]:
        async with served() as (started, _):
            app = started.app
            exact = [route for held in app._exact.values() for route in held.values()]
            return [*exact, *(r for _, held in app._below for r in held.values())]

    found = asyncio.run(routes())
    assert {route.path for route in found if route.access == "open"} <= {
        "/", "/health", "/ready", "/assets/*",
    }  # fmt: skip
    assert "/flush_cache" in {route.path for route in found if route.access == "admin"}
    for path in ("/v1/chat/completions", "/v1/models", "/metrics", "/server_info"):
        assert [route.access for route in found if route.path == path] == ["key"], path


def test_http_wants_a_key(server: Running) -> None:
    for path in ("/", "/health", "/ready"):
        assert ask(server, "GET", path)[0] == 200
    for path in ("/v1/models", "/metrics", "/version", "/server_info", "/v1/loads"):
        for key in ("", "wrong-" + "x" * 30, hashed(ALICE), ALICE + " "):
            status, head, body = ask(server, "GET", path, key)
            if key.strip() != ALICE:
                assert status == 401 and head["www-authenticate"] == "Bearer"
                assert json.loads(body)["error"]["code"] == "invalid_api_key"
        for key in (ALICE, BOB, ROOT_KEY):
            assert ask(server, "GET", path, key)[0] == 200
    assert completion(server)[0] == 401 and completion(server, BOB)[0] == 200
    assert [ask(server, "POST", "/flush_cache", key)[0] for key in ("", ALICE, ROOT_KEY)] == [
        401, 403, 200,
    ]  # fmt: skip


def test_the_websocket_wants_a_key(server: Running) -> None:
    finished = by_socket(server, ALICE)
    assert isinstance(finished, m.Finished) and finished.reason == "stop"
    with pytest.raises(InvalidStatus) as caught:
        by_socket(server, "wrong-" + "x" * 30)
    assert caught.value.response.status_code == 401
    wrong = by_socket(server)  # what comes before a key is refused
    assert isinstance(wrong, m.Error) and wrong.code == "unauthorized"


def methods(service: Any) -> list[Any]:
    return list(service.methods)


def test_every_grpc_method_but_health_wants_a_key(server: Running) -> None:
    services = [
        pb.DESCRIPTOR.services_by_name["SpecServe"],
        vllm.DESCRIPTOR.services_by_name["VllmEngine"],
    ]
    with grpc.insecure_channel(server.grpc) as channel:
        for method in (one for service in services for one in methods(service)):
            name = f"/{method.containing_service.full_name}/{method.name}"
            for key, status in (("", "UNAUTHENTICATED"), ("wrong-" + "x" * 30, "UNAUTHENTICATED")):
                metadata = [("x-api-key", key)] if key else []
                with pytest.raises(grpc.RpcError) as caught:
                    # Bytes that are no message: the key is asked for before anything is read.
                    if method.server_streaming:
                        call = channel.unary_stream(name)(b"\xff", timeout=60, metadata=metadata)
                        next(iter(call))
                    else:
                        channel.unary_unary(name)(b"\xff", timeout=60, metadata=metadata)
                found = caught.value.code().name  # type: ignore[attr-defined]
                if name in grpc_guard.OPEN_METHODS:
                    assert found != "UNAUTHENTICATED", name
                else:
                    assert found == status, (name, found)
        health = channel.unary_unary("/grpc.health.v1.Health/Check")
        assert health(b"", timeout=60) == b"\x08\x01"  # SERVING
    assert by_grpc(server, ALICE) == by_grpc(server, ROOT_KEY) == "hello"
    with pytest.raises(Refused) as refused:
        by_grpc(server, "wrong-" + "x" * 30)
    assert (refused.value.name, refused.value.reason) == ("UNAUTHENTICATED", "UNAUTHORIZED")


def test_a_file_of_keys_is_read_again_on_sighup(tmp_path: Path) -> None:
    with guarded(tmp_path) as running:
        assert completion(running, ALICE)[0] == 200
        (tmp_path / "keys").write_text(f"bob:{hashed(BOB)}\n")
        running.process.send_signal(signal.SIGHUP)
        end = time.monotonic() + 60
        while completion(running, ALICE)[0] == 200:
            assert time.monotonic() < end
            time.sleep(0.02)
        assert completion(running, ALICE)[0] == 401 and completion(running, BOB)[0] == 200
        with pytest.raises(Refused):
            by_grpc(running, ALICE)


def test_nobody_ends_the_requests_of_another_key(tmp_path: Path) -> None:
    with (
        guarded(tmp_path, engine={"pause": 0.02}) as running,
        grpc.insecure_channel(running.grpc) as channel,
    ):
        stub: Any = pb_grpc.SpecServeStub(channel)
        request = pb.GenerateRequest(prompt="hello", request_id="hers")
        request.stop.ignore_eos = True

        def abort(key: str) -> list[str]:
            asked = pb.AbortRequest(request_ids=["hers", "nobody's"])
            return list(stub.Abort(asked, metadata=[("x-api-key", key)], timeout=60).aborted)

        for ends in (ALICE, ROOT_KEY):
            events = stub.Generate(request, metadata=[("x-api-key", ALICE)], timeout=60)
            assert next(events).HasField("started")
            assert abort(BOB) == []
            assert abort(ends) == ["hers"]
            last = list(events)[-1]
            assert last.finished.reason == pb.Finished.CANCELLED
            assert abort(ends) == []


def least(begun: float) -> float:
    """How long a key has to wait at least that may ask every 20 s, and did at `begun`."""
    return 20 - (time.monotonic() - begun)


def test_a_key_that_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    with guarded(tmp_path, key_requests_per_minute=3) as running:
        begun = time.monotonic()
        assert completion(running, ALICE)[0] == 200
        assert isinstance(by_socket(running, ALICE), m.Finished)
        assert by_grpc(running, ALICE) == "hello"
        status, head, body = completion(running, ALICE)
        error = json.loads(body)["error"]
        # A third of a minute from the first one on.
        assert status == 429 and least(begun) <= int(head["retry-after"]) <= 20
        assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limited")
        told = by_socket(running, ALICE)
        assert isinstance(told, m.Error) and told.code == "rate_limited" and told.retryable
        assert 1000 * least(begun) < told.retry_after_ms <= 20_000
        with pytest.raises(Refused) as refused:
            by_grpc(running, ALICE)
        assert (refused.value.name, refused.value.reason) == ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
        assert least(begun) < refused.value.retry <= 20.0
        assert completion(running, BOB)[0] == 200


def test_a_full_server_says_so_at_once(tmp_path: Path) -> None:
    """One place runs, one waits; both are taken by one who waits for nobody else."""
    engine = {"pause": 0.02, "rows": 1}
    with guarded(tmp_path, engine=engine, max_queue=1, key_parallel=3) as running:
        codec = m.Codec(m.JSON)
        wrapped = base64.urlsafe_b64encode(ALICE.encode()).decode().rstrip("=")
        names = [Subprotocol(m.JSON), Subprotocol(f"specserve.key.{wrapped}")]
        with connect(running.ws, subprotocols=names, proxy=None) as opened:
            for gen in ("a", "b"):
                wire = {"type": "generate", "gen": gen, "prompt": "x", "ignore_eos": True}
                opened.send(codec.encode(wire).decode())
            while not isinstance(codec.server_message(opened.recv(60)), m.Delta):
                pass
            status, head, body = completion(running, BOB)
            assert status == 503 and head["retry-after"] == "1"
            assert json.loads(body)["error"]["code"] == "overloaded"
            told = by_socket(running, BOB)
            assert isinstance(told, m.Error) and told.code == "overloaded" and told.retryable
            with pytest.raises(Refused) as refused:
                by_grpc(running, BOB)
            assert (refused.value.name, refused.value.retry) == ("UNAVAILABLE", 1.0)
            assert ask(running, "GET", "/ready")[0] == 200
            # Unread: it is longer than any prompt may be, which would be a 400.
            assert completion(running, BOB, prompt="x" * 50_000)[0] == 503
        end = time.monotonic() + 60
        while completion(running, BOB)[0] != 200:  # the socket's end has freed both places
            assert time.monotonic() < end


def test_a_first_token_that_does_not_come_ends_the_wait_on_every_transport(tmp_path: Path) -> None:
    engine = {"pause": 0.02, "rows": 1}
    with guarded(tmp_path, engine=engine, first_token_timeout_s=0.3) as running:
        codec = m.Codec(m.JSON)
        wrapped = base64.urlsafe_b64encode(ALICE.encode()).decode().rstrip("=")
        names = [Subprotocol(m.JSON), Subprotocol(f"specserve.key.{wrapped}")]
        with connect(running.ws, subprotocols=names, proxy=None) as opened:
            wire = {"type": "generate", "gen": "a", "prompt": "x", "ignore_eos": True}
            while True:  # until its own first token is in time
                opened.send(codec.encode(wire).decode())
                message: Any = None
                while not isinstance(message, (m.Delta, m.Error)):
                    message = codec.server_message(opened.recv(60))
                if isinstance(message, m.Delta):
                    break
            status, _, body = completion(running, BOB)
            assert (status, json.loads(body)["error"]["code"]) == (408, "timeout")
            status, _, body = completion(running, BOB, stream=True)
            # Until the first token a streamed answer has not begun, so it can still be refused.
            assert (status, b'"timeout"' in body) == (408, True), body
            told = by_socket(running, BOB)
            assert isinstance(told, m.Error) and told.code == "timeout"
            with pytest.raises(Refused) as refused:
                by_grpc(running, BOB)
            assert (refused.value.name, refused.value.reason) == ("DEADLINE_EXCEEDED", "TIMEOUT")
            assert isinstance(codec.server_message(opened.recv(60)), m.Delta)  # undisturbed


def test_a_server_out_of_descriptors_recovers(tmp_path: Path) -> None:
    with guarded(tmp_path) as running:
        pid = running.process.pid
        used = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (used + 20, used + 20))
        host, port = running.health.partition("://")[2].partition("/")[0].split(":")
        crowd = [socket.create_connection((host, int(port)), timeout=60) for _ in range(80)]
        time.sleep(0.3)
        for one in crowd:
            one.close()
        end = time.monotonic() + 60
        while True:
            try:
                assert completion(running, ALICE)[0] == 200
                break
            except OSError:
                assert time.monotonic() < end
                time.sleep(0.1)
        running.process.terminate()
        assert running.ended()[0] == 0


def listening(pid: int) -> set[tuple[str, int]]:
    """Address (hex) and port of every socket on which a process listens, from /proc."""
    held = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        try:
            found = re.fullmatch(r"socket:\[(\d+)\]", str(link.readlink()))
        except OSError:
            continue
        if found:
            held.add(found[1])
    ends = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[9] in held and (words[3] == "0A" or table.startswith("udp")):
                address, _, port = words[1].partition(":")
                ends.add((address, int(port, 16)))
    return ends


def test_a_server_listens_on_its_ports_and_loopback_alone(server: Running) -> None:
    ports = {int(address.rpartition(":")[2].partition("/")[0]) for address in
             (server.ws.removeprefix("ws://"), server.grpc)}  # fmt: skip
    found = listening(server.process.pid)
    assert {port for _, port in found} == ports and len(found) == 2
    # 127.0.0.1, which gRPC writes as IPv6 has it.
    assert {address for address, _ in found} <= {"0100007F", "0000000000000000FFFF00000100007F"}
