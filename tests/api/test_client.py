"""The clients against a server process with the echoing engine: one interface, four clients."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from spec_serve import client as package
from spec_serve.api import grpc_convert
from spec_serve.api import messages as m
from spec_serve.client import (
    BadMessage,
    Client,
    ConnectionLost,
    GrpcClient,
    ServerError,
    SyncClient,
    SyncGrpcClient,
    rpc,
    rpc_convert,
    websocket,
)
from spec_serve.client.answers import request
from tests.api.processes import Running, echo_server

KINDS = ("ws", "ws-sync", "session", "session-sync", "grpc", "grpc-sync")


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    # Long: what is to be left or cancelled is not over before.
    with echo_server({"run": 3, "pause": 0.001, "context": 1 << 16}) as running:
        yield running


class Asking:
    """Any of the clients, asked without an event loop."""

    def __init__(self, server: Running, kind: str, **options: Any) -> None:
        self.kind = kind
        if kind == "ws":
            self.client: Any = Client(server.ws, **options)
        elif kind == "ws-sync":
            self.client = SyncClient(server.ws, **options)
        elif kind == "session":
            self.client = Client(f"grpc://{server.grpc}", **options)
        elif kind == "session-sync":
            self.client = SyncClient(f"grpc://{server.grpc}", **options)
        elif kind == "grpc":
            self.client = GrpcClient(server.grpc, **options)
        else:
            self.client = SyncGrpcClient(server.grpc, **options)

    def __call__(self, name: str, *args: Any, **fields: Any) -> Any:
        """What the method `name` returns; for "generate" the first `stop_after` events, or all."""
        after = fields.pop("stop_after", None)
        if self.kind.endswith("sync"):
            with self.client as client:
                if name != "generate":
                    return getattr(client, name)(*args, **fields)
                events = []
                for event in client.generate(**fields):
                    events.append(event)
                    if len(events) == after:
                        break
                return events

        async def go() -> Any:
            async with self.client as client:
                if name != "generate":
                    return await getattr(client, name)(*args, **fields)
                events = []
                async for event in client.generate(**fields):
                    events.append(event)
                    if len(events) == after:
                        break
                return events

        return asyncio.run(go())


def idle(server: Running) -> bool:
    from spec_serve.api.proto import specserve_pb2 as pb
    from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc

    with grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)  # type: ignore[no-untyped-call]
        now = stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=60).stats
    return not now.running and not now.waiting


def wait_idle(server: Running) -> None:
    end = time.monotonic() + 60
    while not idle(server):
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize("kind", KINDS)
def test_events_are_the_same(server: Running, kind: str) -> None:
    fields = {"ids": True, "logprobs": 1, "steps": "tokens"}
    events = Asking(server, kind)("generate", prompt="hello you", gen=f"mine-{kind}", **fields)
    assert [event.seq for event in events] == list(range(len(events)))
    assert {event.gen for event in events} == {f"mine-{kind}"}
    started, deltas, end = events[0], events[1:-1], events[-1]
    assert isinstance(started, m.Started) and isinstance(end, m.Finished)
    assert (started.prompt_tokens, started.model) == (9, "echo")
    assert "".join(delta.text for delta in deltas) == "hello you"
    assert [token for delta in deltas for token in delta.ids] == [*b"hello you", 256]
    step = deltas[0].steps[0]
    assert (step.step, step.drafted, step.accepted) == (1, 3, 2)
    assert step.sources == {"lookup": (3, 2)}
    assert (step.draft_us, step.verify_us, step.host_us) == (1, 2, 3)
    assert step.drafted_parents == [-1, 0, 1] and len(step.drafted_text) == 3
    score = deltas[0].logprobs[0]
    assert (score.id, score.logprob, score.token) == (ord("h"), -0.5, "h")
    assert score.top[0][1] == -9999.0
    assert (end.reason, end.matched, end.last) == ("stop", 256, True)
    assert end.usage == m.Usage(9, 10)
    assert end.speculation is not None and end.speculation.steps == 4


@pytest.mark.parametrize("kind", KINDS)
def test_whole_answers(server: Running, kind: str) -> None:
    answer = Asking(server, kind)("complete", "abc", sampling={"n": 2}, stop=["c"])
    assert [choice.text for choice in answer.choices] == ["ab", "ab"]
    assert (answer.reason, answer.choices[1].matched) == ("stop", "c")
    assert answer.ids == [*b"abc"]
    assert answer.usage is not None and answer.usage.completion_tokens == 3
    said = Asking(server, kind)("chat", "hi there", max_tokens=5)
    assert (said.text, said.reason) == ("hi th", "length")
    turns = [{"role": "user", "content": [{"type": "text", "text": "two"}]}]
    assert Asking(server, kind)("chat", turns).text == "two"
    assert Asking(server, kind)("complete", token_ids=[104, 105]).text == "hi"


@pytest.mark.parametrize("kind", KINDS)
def test_leaving_cancels(server: Running, kind: str) -> None:
    endless = {"prompt": "x" * 50, "ignore_eos": True, "max_tokens": 4000}
    events = Asking(server, kind)("generate", stop_after=4, **endless)
    assert len(events) == 4
    wait_idle(server)
    ask = Asking(server, kind)
    if kind in ("ws-sync", "session-sync"):
        with ask.client as one:
            with pytest.raises(ZeroDivisionError):
                for _ in one.generate(**endless):
                    _ = 1 / 0
            wait_idle(server)  # with the socket still open
            assert one.complete("on").text == "on"


@pytest.mark.parametrize("kind", KINDS)
def test_cancelling_by_id(server: Running, kind: str) -> None:
    async def asynchronous(client: Any) -> Any:
        async with client:
            async for event in client.generate(prompt="x", ignore_eos=True, gen="c" + kind):
                if isinstance(event, m.Started):
                    await client.cancel("c" + kind)
        return event

    def synchronous(client: Any) -> Any:
        with client:
            for event in client.generate(prompt="x", ignore_eos=True, gen="c" + kind):
                if isinstance(event, m.Started):
                    client.cancel("c" + kind)
        return event

    client = Asking(server, kind).client
    last = synchronous(client) if kind.endswith("sync") else asyncio.run(asynchronous(client))
    assert last.reason == "cancelled"


@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_the_same(server: Running, kind: str) -> None:
    ask = Asking(server, kind)
    with pytest.raises(BadMessage) as bad:
        ask("complete", "a", sampling={"temperature": 3})
    assert bad.value.field == "sampling.temperature"
    with pytest.raises(ServerError) as refused:
        Asking(server, kind)("complete", token_ids=[400])
    assert refused.value.code == "invalid_request" and not refused.value.retryable
    assert (refused.value.param or "").startswith("token_ids")
    with pytest.raises(ServerError) as late:
        Asking(server, kind)("complete", "a", ignore_eos=True, timeout_s=0.05)
    assert late.value.code == "timeout"
    with pytest.raises(ServerError) as other:
        Asking(server, kind)("complete", "a", model="another")
    assert other.value.code == "model_not_found"


@pytest.mark.parametrize("kind", KINDS)
def test_nobody_there(kind: str) -> None:
    class Nobody:
        ws = "ws://127.0.0.1:9"
        grpc = "127.0.0.1:9"

    with pytest.raises(OSError):
        Asking(Nobody(), kind, connect_s=0.3)("complete", "a")  # type: ignore[arg-type]


def test_many_threads_share_a_sync_client(server: Running) -> None:
    from concurrent.futures import ThreadPoolExecutor

    with SyncClient(server.ws) as client, ThreadPoolExecutor(8) as pool:
        texts = [f"thread {i}" * (i + 1) for i in range(16)]
        assert [answer.text for answer in pool.map(client.complete, texts)] == texts
        assert client.hello is not None and client.hello.models == ["echo"]
        assert client.ping().server_t > 0


@pytest.mark.parametrize("kind", ["ws", "session"])
def test_a_drop_in_the_middle(server: Running, kind: str) -> None:
    async def go() -> None:
        async with Asking(server, kind, resume=True).client as client:
            # Long, so that it has not all arrived before it is read here.
            text, said, count = "all of this is to arrive " * 80, "", 0
            async for event in client.generate(prompt=text, steps="none"):
                assert event.seq == count
                count += 1
                said += event.text if isinstance(event, m.Delta) else ""
                if count in (3, 40, 41):
                    client.abort()
            assert said == text and client.resumes >= 2
            assert (await client.ping()).server_t > 0
        with pytest.raises(ConnectionLost):
            async with Asking(server, kind).client as client:
                async for _ in client.generate(prompt=text, ignore_eos=True):
                    client.abort()

    asyncio.run(go())
    wait_idle(server)


def test_what_every_field_becomes_over_grpc() -> None:
    fields: dict[str, Any] = {
        "model": "one",
        "messages": [
            {"role": "user", "content": "a", "name": "me"},
            {"role": "assistant", "content": "", "tool_calls": [{"id": "t"}]},
            {"role": "tool", "content": "b", "tool_call_id": "t"},
        ],
        "tools": [{"type": "function"}],
        "sampling": {
            "temperature": 0.5, "top_p": 0.25, "top_k": 3, "min_p": 0.125, "presence_penalty": 1.0,
            "frequency_penalty": -1.0, "repetition_penalty": 1.5, "seed": 2**62, "n": 2,
            "logit_bias": {"7": -3.0},
        },
        "max_tokens": 9, "min_tokens": 2, "stop": ["x"], "stop_token_ids": [4], "bad_words": ["y"],
        "ignore_eos": True, "include_stop": True, "logprobs": 0, "prompt_logprobs": 2,
        "speculation": {"mode": "max", "max_nodes": 4, "sources": ["lookup"], "prediction": "p"},
        "skip_special_tokens": False, "ids": True, "steps": "tokens", "priority": -2,
        "cache_salt": "salt",
    }  # fmt: skip
    wire = request("call", None, fields.pop("messages"), None, fields)
    assert grpc_convert.generate(rpc_convert.to_proto(wire)) == wire
    least = request("call", "", None, None, {})
    assert grpc_convert.generate(rpc_convert.to_proto(least)) == least
    for options, field in (
        ({"sampling": {"logit_bias": {"x": 1.0}}}, "sampling.logit_bias"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content"),
    ):  # fmt: skip
        with pytest.raises(BadMessage) as caught:
            rpc_convert.to_proto(m.generate({"gen": "a", **options}))  # type: ignore[dict-item]
        assert caught.value.field == field


class Ended:
    """A call that ended; what gRPC's errors offer."""

    def __init__(self, code: grpc.StatusCode, said: str, trailing: Any = None) -> None:
        self._held = code, said, trailing

    def code(self) -> grpc.StatusCode:
        return self._held[0]

    def details(self) -> str:
        return self._held[1]

    def trailing_metadata(self) -> Any:
        return self._held[2]


@pytest.mark.parametrize("code", m.Code.__args__)  # type: ignore[attr-defined]
def test_every_error_survives_grpc(code: m.Code) -> None:
    status, said, trailing = grpc_convert.status(
        m.Error(code, "max_tokens: no", param="max_tokens", retryable=True, retry_after_ms=1500)
    )
    made = rpc_convert.failure(Ended(status, said, trailing))
    assert isinstance(made, ServerError)
    assert (made.code, made.param) == (code, "stop.max_tokens")
    assert made.retryable and made.retry_after_ms == 1500


def test_errors_without_our_details() -> None:
    lost = rpc_convert.failure(Ended(grpc.StatusCode.UNAVAILABLE, "connect failed"))
    assert isinstance(lost, ConnectionLost) and "connect failed" in str(lost)
    late = rpc_convert.failure(Ended(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
    assert isinstance(late, ServerError) and late.code == "timeout"


def test_addresses() -> None:
    for url, full in (
        ("127.0.0.1:8000", "ws://127.0.0.1:8000/v1/stream"),
        ("http://h:1/", "ws://h:1/v1/stream"),
        ("https://h", "wss://h/v1/stream"),
        ("ws://h:1/other", "ws://h:1/other"),
    ):
        assert websocket.address(url) == full
    for url in ("ftp://h", "ws://", ""):
        with pytest.raises(ValueError, match="url"):
            websocket.address(url)
    assert websocket.address("grpc://h:1") == "grpc://h:1"
    assert rpc.address("grpc://h:1") == rpc.address("h:1") == "h:1"
    with pytest.raises(ValueError, match="address"):
        rpc.address("grpc://")


def test_the_package_is_light() -> None:
    code = (
        "import sys, spec_serve.client\n"
        "sys.exit(', '.join({'torch', 'transformers', 'grpc', 'numpy'} & set(sys.modules)) or 0)"
    )
    ran = subprocess.run(
        [sys.executable, "-P", "-c", code], capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stderr
    assert all(hasattr(package, name) for name in package.__all__)
    with pytest.raises(AttributeError, match="nothing"):
        package.nothing  # noqa: B018
