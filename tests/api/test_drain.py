"""SIGTERM while HTTP, WebSocket and gRPC stream: what runs may finish, what comes is refused."""

from __future__ import annotations

import asyncio
import http.client
import json
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import grpc
import pytest
from websockets.exceptions import ConnectionClosed, InvalidMessage, InvalidStatus
from websockets.sync.client import connect
from websockets.typing import Subprotocol

import spec_serve.api.server
from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from tests.api.processes import Running, echo_server
from tests.api.serving import served, until

PROMPT = "what was asked comes back "
Begun = Callable[[], None]


def by_http(server: Running, tokens: int, begun: Begun) -> tuple[str, str]:
    """How a streamed completion ends, and its text."""
    host = server.health.partition("://")[2].partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=60)
    body = {
        "model": "echo", "prompt": PROMPT, "max_tokens": tokens, "stream": True, "ignore_eos": True,
    }  # fmt: skip
    text, ending = "", "cut"
    try:
        connection.request("POST", "/v1/completions", json.dumps(body))
        answer = connection.getresponse()
        if answer.status != 200:
            assert answer.getheader("retry-after") and answer.status == 503
            return json.loads(answer.read())["error"]["code"], ""
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            begun()
            if line.strip() == b"data: [DONE]":
                break
            event = json.loads(line[6:])
            if "error" in event:
                ending = event["error"]["code"]
            elif event["choices"]:
                text += event["choices"][0]["text"]
                ending = event["choices"][0]["finish_reason"] or ending
        answer.read()
    except http.client.IncompleteRead:
        pass  # an end that is none, as a client can tell
    finally:
        connection.close()
    return ending, text


def by_socket(server: Running, tokens: int, begun: Begun) -> tuple[str, str]:
    """The same over a WebSocket; the server closes it with 1012 in the end."""
    codec, text, ending = m.Codec(m.JSON), "", "cut"
    with connect(server.ws, subprotocols=[Subprotocol(m.JSON)], proxy=None) as socket:
        wire = {"type": "generate", "gen": "g", "prompt": PROMPT, "max_tokens": tokens}
        socket.send(codec.encode({**wire, "ignore_eos": True}).decode())
        try:
            while True:
                message = codec.server_message(socket.recv(60))
                if isinstance(message, m.Delta):
                    begun()
                    text += message.text
                elif isinstance(message, m.Finished):
                    ending = message.reason
                elif isinstance(message, m.Error):
                    ending = message.code
                if isinstance(message, m.Error):
                    break
        except ConnectionClosed as closed:
            assert closed.rcvd is not None and closed.rcvd.code == 1012
            if not text and ending == "cut":
                ending = "draining"  # the code says so to who asked after the close frame was out
    return ending, text


def by_grpc(server: Running, tokens: int, begun: Begun) -> tuple[str, str]:
    """The same over gRPC."""
    text, ending = "", "cut"
    with grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        request = pb.GenerateRequest(prompt=PROMPT)
        request.stop.ignore_eos, request.stop.max_tokens = True, tokens
        try:
            for event in stub.Generate(request, timeout=60):
                if event.HasField("delta"):
                    begun()
                    text += event.delta.text
                elif event.HasField("finished"):
                    ending = pb.Finished.Reason.Name(event.finished.reason).lower()
        except grpc.RpcError as error:
            # gRPC itself cancels what comes in while it closes its port, before we know of it.
            unseen = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert error.code() in unseen and not text, error
            ending = "draining"
    return ending, text


HANDSHAKE = (
    b"GET /v1/stream HTTP/1.1\r\nconnection: Upgrade\r\nupgrade: websocket\r\n"
    b"sec-websocket-version: 13\r\nsec-websocket-key: AAAAAAAAAAAAAAAAAAAAAA=="
)
WAYS = (by_http, by_socket, by_grpc)
LONG = (PROMPT * 20)[:150]


class Streams:
    """One generation per way, in threads; `wait` until all have begun."""

    def __init__(self, server: Running, tokens: int) -> None:
        self._pool = ThreadPoolExecutor(len(WAYS))
        self._begun: set[int] = set()
        self.ends: list[Future[tuple[str, str]]] = [
            self._pool.submit(way, server, tokens, lambda i=i: self._begun.add(i))  # type: ignore[misc]
            for i, way in enumerate(WAYS)
        ]
        end = time.monotonic() + 60
        while len(self._begun) < len(WAYS):
            assert time.monotonic() < end and not any(f.done() for f in self.ends)
            time.sleep(0.01)

    def results(self) -> list[tuple[str, str]]:
        found = [future.result(60) for future in self.ends]
        self._pool.shutdown()
        return found


def status(server: Running, path: str) -> int:
    host = server.health.partition("://")[2].partition("/")[0]
    connection = http.client.HTTPConnection(host, timeout=60)
    connection.request("GET", path)
    try:
        answer = connection.getresponse()
        answer.read()
        return answer.status
    finally:
        connection.close()


def until_it_drains(server: Running) -> None:
    end = time.monotonic() + 60
    while status(server, "/ready") == 200:
        assert time.monotonic() < end


def quiet(said: str) -> bool:
    return "Traceback" not in said and "Error" not in said


def test_what_runs_may_finish_and_what_comes_is_refused() -> None:
    with echo_server({"pause": 0.02}, drain_s=60.0) as server:
        with connect(server.ws, subprotocols=[Subprotocol(m.JSON)], proxy=None) as held:
            # Goes on until all has been looked at: without it the server might end before.
            wire = {"type": "generate", "gen": "g", "prompt": PROMPT, "ignore_eos": True}
            held.send(json.dumps(wire))
            while '"delta"' not in str(held.recv(60)):
                pass
            streams = Streams(server, 150)
            server.process.send_signal(signal.SIGTERM)
            until_it_drains(server)
            assert status(server, "/health") == 200
            for way in (by_http, by_grpc):
                assert way(server, 5, lambda: None) == ("draining", "")
            with pytest.raises(InvalidStatus, match="503"):
                by_socket(server, 5, lambda: None)
        assert streams.results() == [("length", LONG)] * 3
        code, said = server.ended()
        assert code == 0 and quiet(said), said


def test_who_connected_before_the_port_closed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that comes over an open connection after the port closed is answered with 503."""
    monkeypatch.setattr(spec_serve.api.server, "HEARD_S", 20.0)

    def ask(early: list[socket.socket]) -> list[bytes]:
        for one, head in zip(early, (b"GET /ready HTTP/1.1", HANDSHAKE), strict=True):
            one.sendall(head + b"\r\nhost: here\r\n\r\n")
        return [one.recv(99)[:13] for one in early]

    async def late() -> list[bytes]:
        with ExitStack() as stack:
            async with served() as (server, _):
                where = ("127.0.0.1", server.port)
                early = [stack.enter_context(socket.create_connection(where, 20)) for _ in "12"]
                closing = asyncio.create_task(server.close())
                await until(lambda: not server._http.servers[0].is_serving())  # type: ignore[union-attr]
                told = await asyncio.to_thread(ask, early)
                await closing
                with pytest.raises(ConnectionError):
                    socket.create_connection(where, 20)
                return told

    assert asyncio.run(late()) == [b"HTTP/1.1 503 "] * 2


def test_what_takes_too_long_is_cancelled() -> None:
    with echo_server({"pause": 0.02}, drain_s=0.3) as server:
        streams = Streams(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        endings = [ending for ending, _ in streams.results()]
        assert endings[1:] == ["cancelled", "cancelled"]
        assert endings[0] == "draining"
        code, said = server.ended()
        assert code == 0 and quiet(said), said


def test_a_second_signal_ends_at_once() -> None:
    with echo_server({"pause": 0.02}, drain_s=300.0) as server:
        streams = Streams(server, 4000)
        server.process.send_signal(signal.SIGTERM)
        until_it_drains(server)  # else two signals may be one
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        code, said = server.ended()
        assert code == 1 and quiet(said), said
        streams.results()


def test_a_signal_under_load_on_every_transport() -> None:
    """Whoever was let in gets everything; whoever was not is told so; nobody hangs."""
    with echo_server({"pause": 0.005, "rows": 16}, drain_s=20.0) as server:
        over = False
        found: list[tuple[str, str]] = []

        def ask(way: Callable[..., tuple[str, str]]) -> None:
            while not over:
                try:
                    found.append(way(server, 60, lambda: None))
                except (OSError, ConnectionClosed):
                    break  # the port is closed
                except InvalidStatus as refused:
                    assert refused.response.status_code == 503
                    break
                except InvalidMessage as cut:
                    # The kernel had taken it in the instant in which the port closed.
                    assert isinstance(cut.__cause__, EOFError | OSError), cut.__cause__
                    break

        with ThreadPoolExecutor(12) as pool:
            asking = [pool.submit(ask, way) for way in WAYS * 4]
            while len(found) <= 20 and not any(future.done() for future in asking):
                time.sleep(0.01)
            server.process.send_signal(signal.SIGTERM)
            code, said = server.ended()
            over = True
            for future in asking:
                future.result(60)
        assert code == 0 and quiet(said), said
        done = [text for ending, text in found if ending == "length"]
        assert len(done) > 20 and set(done) == {(PROMPT * 4)[:60]}
        assert {ending for ending, _ in found} <= {"length", "draining"}
