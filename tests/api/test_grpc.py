"""gRPC from a real client's side: a server process with the echoing engine."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from tests.api.processes import Running, echo_server

MIXED = "a\U0001f600\u6f22\u5b57\u00e9\U0001f469\u200d\U0001f467z" * 4


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    # Long: what is to be cancelled is not over before.
    with echo_server({"run": 3, "pause": 0.001, "context": 1 << 16}) as running:
        yield running


@pytest.fixture(scope="module")
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


@pytest.fixture
def stub(channel: grpc.Channel) -> Any:
    return pb_grpc.SpecServeStub(channel)


def until(holds: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def stats(stub: Any) -> Any:
    return stub.GetServerInfo(pb.GetServerInfoRequest()).stats


def idle(stub: Any) -> bool:
    now = stats(stub)
    return not now.running and not now.waiting


def test_a_generation_from_start_to_end(stub: Any) -> None:
    request = pb.GenerateRequest(
        prompt=MIXED, request_id="mine", output=pb.Output(token_ids=True, logprobs=2)
    )
    events = list(stub.Generate(request, timeout=60))
    assert [event.seq for event in events] == list(range(len(events)))
    assert events[0].started.request_id == "mine" and events[0].started.model == "echo"
    deltas = [event.delta for event in events if event.HasField("delta")]
    assert "".join(delta.text for delta in deltas) == MIXED
    assert [t for delta in deltas for t in delta.token_ids] == [*MIXED.encode(), 256]
    scores = [score for delta in deltas for score in delta.logprobs]
    finished = events[-1].finished
    assert finished.reason == pb.Finished.STOP and finished.stop_token_id == 256 and finished.last
    assert finished.usage.completion_tokens == len(scores) == len(MIXED.encode()) + 1
    assert [top.logprob for top in scores[0].top] == [-9999.0, -9999.0]
    steps = [step for delta in deltas for step in delta.steps]
    assert finished.speculation.steps == len(steps)
    assert finished.speculation.accepted == sum(step.accepted for step in steps)
    assert steps[0].sources[0].name == "lookup" and not steps[0].drafted_ids


def test_trees_of_guesses_on_demand(stub: Any) -> None:
    output = pb.Output(spec_detail=pb.SPEC_DETAIL_TOKENS)
    events = list(stub.Generate(pb.GenerateRequest(prompt="abcd", output=output), timeout=60))
    step = next(event.delta.steps[0] for event in events if event.delta.steps)
    assert list(step.drafted_ids) == [0, 0, 0] and list(step.drafted_parents) == [-1, 0, 1]
    assert len(step.drafted_text) == 3


def test_stops_chat_and_limits(stub: Any) -> None:
    stop = pb.Stop(strings=["three"], include_stop_in_output=True)
    events = list(stub.Generate(pb.GenerateRequest(prompt="one two three four", stop=stop)))
    assert "".join(event.delta.text for event in events) == "one two three"
    assert events[-1].finished.stop_string == "three"
    chat = pb.Chat(messages=[pb.Message(role="user", content="hello")])
    limit = pb.Stop(max_tokens=4)
    events = list(stub.Generate(pb.GenerateRequest(chat=chat, stop=limit)))
    assert "".join(event.delta.text for event in events) == "hell"
    assert events[-1].finished.reason == pb.Finished.LENGTH


BAD: list[tuple[pb.GenerateRequest, str]] = [
    (pb.GenerateRequest(), "prompt"),
    (pb.GenerateRequest(prompt=""), "prompt"),
    (pb.GenerateRequest(token_ids=pb.TokenIds()), "token_ids.ids"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[257])), "token_ids.ids"),
    (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[2**31])), "token_ids.ids"),
    (pb.GenerateRequest(chat=pb.Chat()), "chat.messages"),
    (pb.GenerateRequest(chat=pb.Chat(messages=[pb.Message(role="x")])), "chat.messages[0].role"),
    (pb.GenerateRequest(prompt="a", stop=pb.Stop(strings=["b", ""])), "stop.strings[1]"),
    (pb.GenerateRequest(prompt="a", stop=pb.Stop(strings=["b"] * 17)), "stop.strings"),
    (pb.GenerateRequest(prompt="a", stop=pb.Stop(max_tokens=0)), "stop.max_tokens"),
    (pb.GenerateRequest(prompt="a", stop=pb.Stop(token_ids=[300])), "stop.token_ids"),
    (
        pb.GenerateRequest(prompt="a", stop=pb.Stop(max_tokens=3, min_tokens=4)),
        "stop.min_tokens",
    ),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(n=9)), "sampling.n"),
    (
        pb.GenerateRequest(prompt="a", sampling=pb.Sampling(temperature=float("nan"))),
        "sampling.temperature",
    ),
    (
        pb.GenerateRequest(prompt="a", sampling=pb.Sampling(logit_bias={1: float("inf")})),
        "sampling.logit_bias",
    ),
    (
        pb.GenerateRequest(prompt="a", sampling=pb.Sampling(logit_bias={999: 1.0})),
        "sampling.logit_bias",
    ),
    (pb.GenerateRequest(prompt="a", sampling=pb.Sampling(seed=2**63)), "sampling.seed"),
    (pb.GenerateRequest(prompt="a", output=pb.Output(logprobs=21)), "output.logprobs"),
    (
        pb.GenerateRequest(prompt="a", speculation=pb.Speculation(sources=["magic"])),
        "speculation.sources",
    ),
    (pb.GenerateRequest(prompt="x" * 100_000), "prompt"),
    (pb.GenerateRequest(prompt="x", request_id="r" * 129), "request_id"),
]


def test_bad_requests_are_named_and_disturb_nobody(stub: Any) -> None:
    steady = stub.Generate(pb.GenerateRequest(prompt="steady " * 100))
    next(steady)
    for request, field in BAD:
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(request, timeout=60))
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT, (request, caught.value)
        details = {}
        for detail in rpc_status.from_call(caught.value).details:
            for kind in (error_details_pb2.BadRequest, error_details_pb2.ErrorInfo):
                if detail.Is(kind.DESCRIPTOR):
                    made = kind()
                    detail.Unpack(made)
                    details[kind] = made
        assert details[error_details_pb2.ErrorInfo].domain == "specserve"
        named = details[error_details_pb2.BadRequest].field_violations[0].field
        assert named.partition("[999")[0] == field
        assert caught.value.details().startswith(field)
    assert "".join(event.delta.text for event in steady) == "steady " * 100


def test_other_statuses(stub: Any) -> None:
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(pb.GenerateRequest(prompt="a", model="gpt-9")))
    assert caught.value.code() == grpc.StatusCode.NOT_FOUND
    endless = pb.GenerateRequest(prompt="a", request_id="same", stop=pb.Stop(ignore_eos=True))
    running = stub.Generate(endless)
    next(running)
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(endless))
    assert caught.value.code() == grpc.StatusCode.ALREADY_EXISTS
    running.cancel()
    until(lambda: idle(stub))


def test_cancel_deadline_and_abort_reach_the_engine(stub: Any) -> None:
    endless = pb.GenerateRequest(prompt="a", stop=pb.Stop(ignore_eos=True))
    before = stats(stub).aborted
    for _ in range(3):
        call = stub.Generate(endless)
        next(call)
        call.cancel()
    until(lambda: idle(stub))
    assert stats(stub).aborted == before + 3
    with pytest.raises(grpc.RpcError) as caught:
        list(stub.Generate(endless, timeout=0.1))
    assert caught.value.code() == grpc.StatusCode.DEADLINE_EXCEEDED
    until(lambda: idle(stub))
    endless.request_id = "victim"
    call = stub.Generate(endless)
    next(call)
    answer = stub.Abort(pb.AbortRequest(request_ids=["victim", "nobody"]))
    assert list(answer.aborted) == ["victim"]
    assert list(call)[-1].finished.reason == pb.Finished.CANCELLED


def test_tokenize(stub: Any) -> None:
    answer = stub.Tokenize(pb.TokenizeRequest(prompt="h\u00e9"))
    assert list(answer.ids) == [104, 195, 169] and answer.text == "h\u00e9"
    ids = pb.TokenIds(ids=[104, 105, 256])
    assert stub.Tokenize(pb.TokenizeRequest(detokenize=ids)).text == "hi<eos>"
    with pytest.raises(grpc.RpcError) as caught:
        stub.Tokenize(pb.TokenizeRequest(detokenize=pb.TokenIds(ids=[257])))
    assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT


def test_models_health_and_reflection(stub: Any, channel: grpc.Channel) -> None:
    (model,) = stub.ListModels(pb.ListModelsRequest()).models
    assert (model.id, model.vocab_size, list(model.sources)) == ("echo", 257, ["lookup"])
    info = stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.max_running == 4 and not info.draining and info.uptime_s > 0
    health = health_pb2_grpc.HealthStub(channel)
    for name in ("", "specserve.v1.SpecServe"):
        answer = health.Check(health_pb2.HealthCheckRequest(service=name))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING
    mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    (listed,) = mirror.ServerReflectionInfo(iter([ask]))
    names = {service.name for service in listed.list_services_response.service}
    assert "specserve.v1.SpecServe" in names


def test_sigterm_drains_and_ends_with_zero() -> None:
    with echo_server({"run": 1, "pause": 0.004}) as running:
        with grpc.insecure_channel(running.grpc) as channel:
            stub = pb_grpc.SpecServeStub(channel)
            watch = health_pb2_grpc.HealthStub(channel).Watch(health_pb2.HealthCheckRequest())
            assert next(watch).status == health_pb2.HealthCheckResponse.SERVING
            text = "abcdefgh" * 20
            call = stub.Generate(pb.GenerateRequest(prompt=text))
            next(call)
            running.process.send_signal(signal.SIGTERM)
            assert next(watch).status == health_pb2.HealthCheckResponse.NOT_SERVING
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(prompt="late")))
            # The latter by gRPC itself, if the drain is over and it is closing its port.
            late = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
            assert caught.value.code() in late
            assert "".join(event.delta.text for event in call) == text
        assert running.ended() == (0, "")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_what_outlasts_the_drain_is_cancelled(number: signal.Signals) -> None:
    with echo_server({"run": 1, "pause": 0.002}, drain_s=0.2) as running:
        with grpc.insecure_channel(running.grpc) as channel:
            stub = pb_grpc.SpecServeStub(channel)
            call = stub.Generate(pb.GenerateRequest(prompt="a", stop=pb.Stop(ignore_eos=True)))
            next(call)
            running.process.send_signal(number)
            assert list(call)[-1].finished.reason == pb.Finished.CANCELLED
        assert running.ended()[0] == 0


@pytest.mark.skipif(not os.path.exists("/proc/self/net/tcp"), reason="needs Linux's /proc")
def test_only_the_two_ports_listen_and_only_on_loopback(server: Running) -> None:
    proc = f"/proc/{server.process.pid}"
    held = {os.readlink(f"{proc}/fd/{name}") for name in os.listdir(f"{proc}/fd")}
    listening = set()
    for table in ("tcp", "tcp6"):
        with open(f"{proc}/net/{table}") as lines:
            for row in (line.split() for line in lines):
                if row[3] == "0A" and f"socket:[{row[9]}]" in held:
                    listening.add(row[1].removeprefix("0000000000000000FFFF0000"))
    ports = {int(a.rpartition(":")[2].partition("/")[0]) for a in (server.ws[5:], server.grpc)}
    assert listening == {f"0100007F:{port:04X}" for port in ports}
