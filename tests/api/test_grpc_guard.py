"""What no gRPC client may see or cause: particulars of a failure, tracebacks for garbage."""

from __future__ import annotations

import asyncio
import signal
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from spec_serve.api import messages as m
from spec_serve.api import traces
from spec_serve.api.grpc_guard import Guard
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.proto import specserve_pb2_grpc as pb_grpc
from spec_serve.client import Client
from tests.api.processes import echo_server


class Context:
    """Notes how a call was aborted."""

    def __init__(self) -> None:
        self.answer: tuple[Any, ...] = ()

    async def abort(self, *answer: Any) -> None:
        self.answer = answer
        raise grpc.aio.AbortError


def call(
    inner: Any, data: bytes = b"", *, stream: bool = False, metadata: Any = ()
) -> tuple[Any, Context]:
    """What a guarded method returns for a request, and its context."""
    make = grpc.unary_stream_rpc_method_handler if stream else grpc.unary_unary_rpc_method_handler
    handler = make(inner, pb.AbortRequest.FromString, pb.AbortResponse.SerializeToString)
    context = Context()

    async def continuation(details: Any) -> Any:
        return handler

    async def go() -> Any:
        details = SimpleNamespace(method="/x/Y", invocation_metadata=metadata)
        guarded = await Guard().intercept_service(continuation, details)
        assert guarded.response_streaming == stream
        method = guarded.unary_stream if stream else guarded.unary_unary
        try:
            return await method(guarded.request_deserializer(data), context)
        except grpc.aio.AbortError:
            return None

    return asyncio.run(go()), context


@pytest.mark.parametrize("stream", [False, True])
def test_what_is_well_passes_through(stream: bool) -> None:
    async def inner(request: Any, context: Any) -> Any:
        return list(request.request_ids)

    data = pb.AbortRequest(request_ids=["a"]).SerializeToString()
    answer, context = call(inner, data, stream=stream)
    assert answer == ["a"] and context.answer == ()


def test_a_callers_span_is_known_to_the_method() -> None:
    async def inner(request: Any, context: Any) -> Any:
        return traces.caller.get()

    parent = "00-" + "a" * 32 + "-" + "b" * 16 + "-01"
    assert call(inner, metadata=(("traceparent", parent),))[0] == parent
    assert call(inner)[0] is None


def test_a_failure_is_told_without_particulars(caplog: pytest.LogCaptureFixture) -> None:
    async def inner(request: Any, context: Any) -> Any:
        raise RuntimeError("secret at 0x1234")

    _, context = call(inner)
    code, said, _ = context.answer
    assert code == grpc.StatusCode.INTERNAL and "secret" not in said and "Runtime" not in said
    assert caplog.text.count("RuntimeError: secret") == 1 and "/x/Y" in caplog.text


def test_an_answer_is_no_failure(caplog: pytest.LogCaptureFixture) -> None:
    async def inner(request: Any, context: Any) -> Any:
        await context.abort(grpc.StatusCode.NOT_FOUND, "no", ())

    _, context = call(inner)
    assert context.answer[0] == grpc.StatusCode.NOT_FOUND and not caplog.text


def test_garbage_is_the_clients_fault_and_leaves_no_traceback() -> None:
    with echo_server() as running:
        with grpc.insecure_channel(running.grpc) as channel:
            for name, make in (
                ("Generate", channel.unary_stream),
                ("Tokenize", channel.unary_unary),
            ):
                with pytest.raises(grpc.RpcError) as caught:
                    answer = make(f"/specserve.v1.SpecServe/{name}")(b"\xff\xff\xff", timeout=60)
                    list(answer)
                assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
                assert "decoded" in caught.value.details()
            stub: Any = pb_grpc.SpecServeStub(channel)
            assert list(stub.Generate(pb.GenerateRequest(prompt="still here"), timeout=60))
        running.process.send_signal(signal.SIGTERM)
        code, said = running.ended()
        assert code == 0 and "Traceback" not in said and "Unexpected" not in said


def test_abort_ends_what_runs_on_a_websocket() -> None:
    async def go(url: str, stub: Any) -> None:
        async with Client(url) as client:
            async for event in client.generate(prompt="a", ignore_eos=True):
                if isinstance(event, m.Started):
                    asked = pb.AbortRequest(request_ids=["nobody", event.id])
                    answer = await asyncio.to_thread(stub.Abort, asked, timeout=60)
                    assert list(answer.aborted) == [event.id]
            assert isinstance(event, m.Finished) and event.reason == "cancelled"

    with echo_server({"pause": 0.01}) as running, grpc.insecure_channel(running.grpc) as channel:
        asyncio.run(go(running.ws, pb_grpc.SpecServeStub(channel)))
