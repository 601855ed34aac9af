"""How gRPC calls live and end: silence, deaf readers, samples of the counters."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import struct
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from grpc_health.v1._async import HealthServicer

from spec_serve.api import grpc_convert as convert
from spec_serve.api import grpc_server
from spec_serve.api import messages as m
from spec_serve.api.grpc_stats import sample
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.bench.http2 import opening
from spec_serve.spec.stats import EngineStats
from tests.api.processes import Running, echo_server


def until(holds: Callable[[], bool], within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while not holds():
        assert time.monotonic() < end, f"did not come true in {within_s} s"
        time.sleep(0.02)


def counters(stub: Any) -> Any:
    return stub.GetServerInfo(pb.GetServerInfoRequest()).stats


def running(stub: Any) -> int:
    stats = counters(stub)
    return int(stats.running + stats.waiting)


def given_up(stub: Any) -> bool:
    """Whether the one request there was has ended."""
    stats = counters(stub)
    return bool(stats.requests == stats.finished == 1)


@pytest.mark.slow
def test_pings_through_a_silent_prefill_are_no_strikes() -> None:
    """A client that pings every second while nothing comes for six is not told to go away."""
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 30_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    with (
        echo_server({"run": 1, "pause": 6.0}) as server,
        grpc.insecure_channel(server.grpc, options) as channel,
    ):
        stub: Any = pb_grpc.SpecServeStub(channel)
        events = list(stub.Generate(pb.GenerateRequest(prompt="a"), timeout=60))
    assert events[-1].finished.last
    assert "".join(event.delta.text for event in events) == "a"


def test_who_does_not_read_is_given_up_on_and_disturbs_nobody() -> None:
    """The engine is freed while a write is stuck; whoever shares the connection goes on."""
    wide = {"run": 40, "pause": 0.001, "context": 200_000}
    with echo_server(wide) as server, grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        deaf = pb.GenerateRequest(
            prompt="a" * 64,
            stop=pb.Stop(ignore_eos=True),
            output=pb.Output(token_ids=True, logprobs=20, spec_detail=pb.SPEC_DETAIL_TOKENS),
        )
        call = stub.Generate(deaf, timeout=60)
        until(lambda: given_up(stub))
        text = "still served " * 20
        events = list(stub.Generate(pb.GenerateRequest(prompt=text), timeout=60))
        assert "".join(event.delta.text for event in events) == text
        seqs = []
        with pytest.raises(grpc.RpcError) as caught:
            for event in call:
                seqs.append(event.seq)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert seqs == list(range(len(seqs))) and seqs


def test_a_session_that_does_not_read_is_given_up_on() -> None:
    wide = {"run": 40, "pause": 0.001, "context": 200_000}
    request = pb.GenerateRequest(
        prompt="a" * 64,
        stop=pb.Stop(ignore_eos=True),
        output=pb.Output(token_ids=True, logprobs=20),
    )
    asked = pb.SessionRequest(generate=pb.SessionGenerate(gen="g", request=request))
    with echo_server(wide) as server, grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        call = stub.Session(iter([asked]), timeout=60)
        until(lambda: given_up(stub))
        with pytest.raises(grpc.RpcError) as caught:
            list(call)
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED


def test_health_follows_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine in a process of its own may be gone for a while."""
    monkeypatch.setattr(grpc_server, "FOLLOW_S", 0.001)
    service: Any = SimpleNamespace(ready=True)
    ask, told = health_pb2.HealthCheckRequest(), health_pb2.HealthCheckResponse

    async def go() -> None:
        server: Any = object.__new__(grpc_server.GrpcServer)
        server._service, server._health = service, HealthServicer()
        following = asyncio.create_task(server._follow())

        async def says(status: Any) -> None:
            while (await server._health.Check(ask, None)).status != status:
                await asyncio.sleep(0.002)

        for ready, status in ((False, told.NOT_SERVING), (True, told.SERVING)) * 2:
            service.ready = ready
            await asyncio.wait_for(says(status), 60)
        service.ready = False
        await server.not_serving()
        service.ready = True
        await asyncio.sleep(0.02)
        assert (await server._health.Check(ask, None)).status == told.NOT_SERVING
        following.cancel()

    asyncio.run(go())


def descriptors(server: Running) -> int:
    return len(os.listdir(f"/proc/{server.process.pid}/fd"))


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_clients_that_vanish_at_every_event_leave_nothing_behind() -> None:
    """By cancelling, by a deadline and by closing the connection; calls, sessions and samples."""
    endless = pb.GenerateRequest(prompt="abc", stop=pb.Stop(ignore_eos=True))
    asked = pb.SessionRequest(generate=pb.SessionGenerate(gen="g", request=endless))

    def calls(stub: Any) -> list[Any]:
        made = stub.Session(iter([asked]), timeout=60)
        return [stub.Generate(endless, timeout=60), made, stub.WatchStats(pb.WatchStatsRequest())]

    with echo_server({"run": 2, "pause": 0.001, "context": 1 << 16}) as server:
        with grpc.insecure_channel(server.grpc) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            steady = stub.Generate(pb.GenerateRequest(prompt="steady " * 150), timeout=60)
            next(steady)
            before = descriptors(server)
            for event in range(12):
                for call in calls(stub)[: 3 if event < 2 else 2]:
                    for _ in range(event):
                        next(call)
                    call.cancel()
                with grpc.insecure_channel(
                    server.grpc, [("grpc.use_local_subchannel_pool", 1)]
                ) as other:
                    for call in calls(pb_grpc.SpecServeStub(other))[:2]:  # type: ignore[no-untyped-call]
                        for _ in range(event):
                            next(call)
                with pytest.raises(grpc.RpcError):
                    list(stub.Generate(endless, timeout=0.002 * (event + 1)))
            assert "".join(event.delta.text for event in steady) == ("steady " * 150)
            until(lambda: not running(stub))
            until(lambda: descriptors(server) <= before)
            stats = stub.GetServerInfo(pb.GetServerInfoRequest()).stats
            assert stats.finished == stats.requests
        server.process.send_signal(signal.SIGTERM)
        assert server.ended() == (0, "")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="needs Linux's /proc")
def test_connections_cut_at_any_byte_leave_nothing_behind() -> None:
    """Closed or reset in the preface, a head, a message or an answer; and bytes of no protocol."""
    rng = random.Random(9)
    endless = pb.GenerateRequest(prompt="abc", stop=pb.Stop(ignore_eos=True))
    with echo_server({"run": 2, "pause": 0.001}) as server:
        host, _, port = server.grpc.rpartition(":")
        path = "/specserve.v1.SpecServe/Generate"
        whole = opening(server.grpc, path, endless.SerializeToString())
        with grpc.insecure_channel(server.grpc) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            steady = stub.Generate(pb.GenerateRequest(prompt="steady " * 150), timeout=60)
            next(steady)
            before = descriptors(server)
            for turn in range(400):
                with socket.create_connection((host, int(port)), 60.0) as client:
                    cut = rng.randint(0, len(whole)) if turn % 4 else len(whole)
                    client.sendall(whole[:cut] if turn % 10 else rng.randbytes(cut))
                    if turn % 4 == 0 and turn % 10:
                        client.recv(rng.randint(1, 200))
                    if turn % 2:  # a reset
                        linger = struct.pack("ii", 1, 0)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            assert "".join(event.delta.text for event in steady) == "steady " * 150
            until(lambda: not running(stub))
            until(lambda: descriptors(server) <= before)
        server.process.send_signal(signal.SIGTERM)
        code, said = server.ended()
        assert code == 0 and "Traceback" not in said, said


def test_heads_too_large_are_refused() -> None:
    with echo_server() as server, grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        for metadata in ([("x-a", "b" * (1 << 20))], [(f"x-{i}", "b" * 50) for i in range(10_000)]):
            with pytest.raises(grpc.RpcError) as caught:
                stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=60)
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert stub.ListModels(pb.ListModelsRequest(), timeout=60).models


def test_small_messages_that_grow_large_are_refused() -> None:
    options, gzip = [("grpc.max_send_message_length", -1)], grpc.Compression.Gzip
    with echo_server() as server:  # noqa: SIM117
        with grpc.insecure_channel(server.grpc, options, compression=gzip) as channel:
            stub: Any = pb_grpc.SpecServeStub(channel)
            assert list(stub.Generate(pb.GenerateRequest(prompt="a"), timeout=60))
            before = most_memory(server)
            with pytest.raises(grpc.RpcError) as caught:
                list(stub.Generate(pb.GenerateRequest(prompt="a" * (64 << 20)), timeout=60))
            assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
            assert most_memory(server) < before + (40 << 20)


def most_memory(server: Running) -> int:
    """Bytes ever resident; 0 where nobody says."""
    if not os.path.exists("/proc/self/status"):
        return 0
    with open(f"/proc/{server.process.pid}/status") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))


def test_fields_of_a_newer_proto_are_refused_not_passed_over() -> None:
    for inner, path in (
        (pb.GenerateRequest, ""),
        (pb.Sampling, "sampling."),
        (pb.Output, "output."),
        (pb.Speculation, "speculation."),
    ):
        odd = inner.FromString(b"\xa2\x06\x02hi")  # field 100
        request = pb.GenerateRequest(prompt="a")
        if path:
            getattr(request, path[:-1]).MergeFrom(odd)
        else:
            request.MergeFrom(odd)
        with pytest.raises(m.BadMessage) as caught:
            convert.generate(request)
        assert caught.value.field == f"{path}100"
    turn = pb.Message.FromString(b"\n\x04user\x12\x02hi\xa2\x06\x01x")
    with pytest.raises(m.BadMessage) as caught:
        convert.generate(pb.GenerateRequest(chat=pb.Chat(messages=[turn, turn])))
    assert caught.value.field == "chat.messages[0].100"
    convert.generate(pb.GenerateRequest(prompt="a", sampling=pb.Sampling(logit_bias={1: 2.0})))


def test_what_is_lost_with_the_engine_may_be_tried_again_if_it_restarts() -> None:
    lost = m.Error("engine_error", "restarting", retryable=True, retry_after_ms=1500)
    assert convert.status(lost)[0] == grpc.StatusCode.UNAVAILABLE
    assert convert.status(m.Error("engine_error", "lost"))[0] == grpc.StatusCode.INTERNAL


def test_samples_come_at_once_and_then_at_intervals() -> None:
    quick = echo_server({"run": 4, "pause": 0.002})
    with quick as server, grpc.insecure_channel(server.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        watch = stub.WatchStats(pb.WatchStatsRequest(interval_ms=100), timeout=60)
        first = next(watch)
        assert first.stats.requests == 0 and not first.draining
        list(stub.Generate(pb.GenerateRequest(prompt="abc" * 30), timeout=60))
        seen = [next(watch)]
        while seen[-1].stats.tokens_out < 91:
            seen.append(next(watch))
        seen.append(next(watch))
        tokens = sum(one.tokens_per_s * one.interval_s for one in seen)
        assert round(tokens) == 91 == seen[-1].stats.tokens_out
        assert all(0.09 < one.interval_s < 60 for one in seen)
        for interval in (99, 60_001, 2**32 - 1):
            with pytest.raises(grpc.RpcError) as caught:
                next(stub.WatchStats(pb.WatchStatsRequest(interval_ms=interval)))
            assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
            assert caught.value.details().startswith("interval_ms")


def test_rates() -> None:
    before = EngineStats(steps=10, tokens_out=100, drafted=40, accepted=10, prompt_tokens=5)
    now = EngineStats(
        steps=20, tokens_out=160, drafted=60, accepted=25, prompt_tokens=25, prefix_hit_tokens=5
    )
    made = sample(before, now, 2.0)
    assert (made.steps_per_s, made.tokens_per_s, made.tokens_per_step) == (5.0, 30.0, 6.0)
    assert (made.acceptance_rate, made.prefix_hit_rate) == (0.75, 0.25)
    assert made.stats.tokens_out == 160
    same = sample(now, now, 0.0)
    assert not (same.tokens_per_s or same.tokens_per_step or same.acceptance_rate)
    restarted = sample(now, before, 2.0)
    assert restarted.tokens_per_s == 0 and restarted.steps_per_s == 0


def step(number: int, sources: dict[str, tuple[int, int]], **more: Any) -> m.Step:
    return m.Step(number, 4, 3, sources, 5, 6, 7, **more)


def test_a_reused_message_says_the_same_as_a_new_one() -> None:
    """Whatever was said before: nothing of it is left."""
    event = pb.GenerateEvent()
    reused = convert.Reused(event)
    usual = [
        m.Delta("g", 3, 2, "text", [1, 2, 3], [], [step(1, {"lookup": (4, 3), "shared": (1, 0)})]),
        m.Delta("g", 0, 0, "", [], [], [step(0, {})]),
        m.Delta("g", 9, 0, "\u6f22", [7], [], [m.Step(5, 0, 0, {"a": (0, 0)})]),
        m.Delta("g", 10, 1, "x", [], [], [step(6, {"b": (2, 1), "c": (3, 3), "d": (0, 0)})]),
    ]
    for message in (*usual, *reversed(usual)):
        assert reused.fill(message)
        assert event.SerializeToString() == convert.event(message).SerializeToString()
    unusual = [
        m.Delta("g", 0, 0, "a", [1], [m.Logprob(1, -0.5, "a")], [step(1, {})]),
        m.Delta("g", 0, 0, "a", [1], [], []),
        m.Delta("g", 0, 0, "a", [1], [], [step(1, {}), step(2, {})]),
        m.Delta("g", 0, 0, "a", [1], [], [step(1, {}, drafted_ids=[4])]),
    ]
    assert not any(map(reused.fill, unusual))
