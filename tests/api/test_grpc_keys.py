"""Keys over gRPC: deny by default, health alone is open; reflection only where it is wanted."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from spec_serve.api.grpc_guard import ADMIN_METHODS, OPEN_METHODS, presented
from spec_serve.api.grpc_server import SERVICES
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from tests.api.processes import Running, echo_server

KEY, OTHER, ADMIN = "k" * 24, "o" * 24, "a" * 24


@pytest.fixture(scope="module")
def server() -> Iterator[Running]:
    engine = {"pause": 0.001, "context": 1 << 16}  # what is to be cancelled is not over before
    with echo_server(engine, api_keys=[KEY], admin_key=ADMIN, reflection=False) as running:
        yield running


@pytest.fixture
def channel(server: Running) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(server.grpc) as channel:
        yield channel


def reason(error: Any) -> str:
    for detail in rpc_status.from_call(error).details:
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            assert info.domain == "specserve"
            return str(info.reason)
    raise AssertionError("no ErrorInfo")


def answer(channel: grpc.Channel, service: Any, method: Any, metadata: Any = ()) -> Any:
    """What a method says to an empty request: the error, or None if it let us in."""
    make = {
        (False, False): channel.unary_unary,
        (False, True): channel.unary_stream,
        (True, True): channel.stream_stream,
    }[method.client_streaming, method.server_streaming]
    call = make(f"/{service.full_name}/{method.name}")
    given = iter([b""]) if method.client_streaming else b""
    try:
        if method.server_streaming:
            with_answer = call(given, metadata=metadata, timeout=60)
            next(with_answer)
            with_answer.cancel()
        else:
            call(given, metadata=metadata, timeout=60)
    except grpc.RpcError as error:
        return error
    return None


METHODS = [(service, method) for service in SERVICES for method in service.methods]


@pytest.mark.parametrize("metadata", [(), (("x-api-key", OTHER),), (("authorization", KEY),)])
def test_every_method_but_health_asks_for_a_key(channel: grpc.Channel, metadata: Any) -> None:
    assert METHODS
    for service, method in METHODS:
        error = answer(channel, service, method, metadata)
        if f"/{service.full_name}/{method.name}" in OPEN_METHODS:
            code = None if error is None else error.code()
            assert code in (None, grpc.StatusCode.UNIMPLEMENTED), method.name
            continue
        assert error is not None, method.name
        assert error.code() == grpc.StatusCode.UNAUTHENTICATED
        assert reason(error) == "UNAUTHORIZED" and OTHER not in error.details()


@pytest.mark.parametrize("metadata", [(("x-api-key", KEY),), (("authorization", f"Bearer {KEY}"),)])
def test_a_key_opens_all_that_is_not_administration(channel: grpc.Channel, metadata: Any) -> None:
    for service, method in METHODS:
        error = answer(channel, service, method, metadata)
        code = None if error is None else error.code()
        if f"/{service.full_name}/{method.name}" in ADMIN_METHODS:
            assert code == grpc.StatusCode.PERMISSION_DENIED and reason(error) == "FORBIDDEN"
        else:
            assert code not in (
                grpc.StatusCode.UNAUTHENTICATED,
                grpc.StatusCode.PERMISSION_DENIED,
            ), method.name


def test_health_is_open_and_reflection_can_be_off(channel: grpc.Channel) -> None:
    health = health_pb2_grpc.HealthStub(channel)
    status = health.Check(health_pb2.HealthCheckRequest()).status
    assert status == health_pb2.HealthCheckResponse.SERVING
    mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
    ask = reflection_pb2.ServerReflectionRequest(list_services="")
    with pytest.raises(grpc.RpcError) as caught:
        next(mirror.ServerReflectionInfo(iter([ask]), metadata=(("x-api-key", KEY),)))
    assert caught.value.code() == grpc.StatusCode.UNIMPLEMENTED


def test_an_unknown_caller_is_not_read(channel: grpc.Channel) -> None:
    """Garbage of somebody without a key is refused for the key, not for the garbage."""
    for name in ("Generate", "WatchStats"):
        call = channel.unary_stream(f"/specserve.v1.SpecServe/{name}")
        with pytest.raises(grpc.RpcError) as caught:
            list(call(b"\xff\xff\xff", timeout=60))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED


def test_nobody_resumes_what_another_key_began(channel: grpc.Channel) -> None:
    stub: Any = pb_grpc.SpecServeStub(channel)
    mine, theirs = ([("x-api-key", key)] for key in (KEY, ADMIN))
    asked = pb.GenerateRequest(prompt="secret", stop=pb.Stop(ignore_eos=True))
    begin = pb.SessionRequest(
        generate=pb.SessionGenerate(gen="g", request=asked, resumable=True)
    )
    first = stub.Session(iter([begin]), metadata=mine, timeout=60)
    token = next(first).hello.resume_token
    while not next(first).generation.event.HasField("delta"):
        pass
    first.cancel()
    resume = pb.SessionRequest(resume=pb.SessionResume(resume_token=token, gens={"g": -1}))
    events = list(stub.Session(iter([resume]), metadata=theirs, timeout=60))
    assert [event.error.code for event in events if event.HasField("error")] == ["resume_gap"]
    assert not any(event.HasField("generation") for event in events)
    again = stub.Session(
        iter([resume, pb.SessionRequest(cancel=pb.SessionCancel(gen="g"))]),
        metadata=mine,
        timeout=60,
    )
    last = list(again)[-1].generation.event.finished
    assert last.reason == pb.Finished.CANCELLED


def test_a_limit_of_a_key_is_told_with_the_time_to_wait() -> None:
    limited = echo_server(api_keys=[KEY], key_requests_per_minute=1)
    with limited as running, grpc.insecure_channel(running.grpc) as channel:
        stub: Any = pb_grpc.SpecServeStub(channel)
        metadata = (("x-api-key", KEY),)
        asked = pb.GenerateRequest(prompt="hi")
        assert list(stub.Generate(asked, metadata=metadata, timeout=60))
        with pytest.raises(grpc.RpcError) as caught:
            list(stub.Generate(asked, metadata=metadata, timeout=60))
        assert caught.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert reason(caught.value) == "RATE_LIMITED"
        (delay,) = [
            detail for detail in rpc_status.from_call(caught.value).details
            if detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR)
        ]  # fmt: skip
        told = error_details_pb2.RetryInfo()
        delay.Unpack(told)
        assert 0 < told.retry_delay.seconds <= 60
        mirror = reflection_pb2_grpc.ServerReflectionStub(channel)
        ask = reflection_pb2.ServerReflectionRequest(list_services="")
        with pytest.raises(grpc.RpcError) as caught:
            next(mirror.ServerReflectionInfo(iter([ask]), timeout=60))
        assert caught.value.code() == grpc.StatusCode.UNAUTHENTICATED
        (listed,) = mirror.ServerReflectionInfo(iter([ask]), metadata=metadata, timeout=60)
        names = {one.name for one in listed.list_services_response.service}
        assert {one.full_name for one in SERVICES} <= names


@pytest.mark.parametrize(
    ("metadata", "key"),
    [
        (None, None),
        ((), None),
        ((("authorization", "Bearer abc"),), "abc"),
        ((("authorization", "bearer  abc "),), "abc"),
        ((("authorization", "Basic abc"), ("x-api-key", "def")), None),
        ((("x-api-key", "def"),), "def"),
        ((("x-api-key", b"def"),), None),
    ],
)
def test_where_a_key_may_stand(metadata: Any, key: str | None) -> None:
    assert presented(metadata) == key
