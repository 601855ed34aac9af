"""What every gRPC call passes: its key, bytes that are no message, and failures that are our own.

Deny by default: a method needs a key unless it stands in OPEN_METHODS. grpc.aio tells the client
an exception's class and text, and the log a traceback, even for garbage a client sent. Here
garbage is the client's INVALID_ARGUMENT, and a failure is told without particulars and logged
once. Knows no method beyond those two lists.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextvars import ContextVar
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from spec_serve.api import messages as m
from spec_serve.api import traces
from spec_serve.api.auth import LOCAL, OPEN, Keys, Principal
from spec_serve.api.generation import failure
from spec_serve.api.grpc_convert import status
from spec_serve.spec.request import RequestError

log = logging.getLogger("spec_serve.grpc")

OPEN_METHODS = frozenset(
    {
        "/grpc.health.v1.Health/Check",
        "/grpc.health.v1.Health/Watch",
        "/grpc.health.v1.Health/List",
        "/vllm.grpc.engine.VllmEngine/HealthCheck",
    }
)
ADMIN_METHODS = frozenset(
    {
        "/vllm.grpc.engine.VllmEngine/FlushCache",
        "/vllm.grpc.engine.VllmEngine/StartProfile",
        "/vllm.grpc.engine.VllmEngine/StopProfile",
        # It tells the tokens of everybody's prompts.
        "/vllm.grpc.engine.VllmEngine/SubscribeKvEvents",
    }
)

# Who makes the call that is being served; set before its method runs.
caller: ContextVar[Principal] = ContextVar("caller", default=LOCAL)

_GARBAGE = m.Error("invalid_request", "the message can't be decoded")
_FAILED = m.Error("engine_error", "the call failed in the server; its log says more")

_MAKE = {
    (False, False): grpc.unary_unary_rpc_method_handler,
    (False, True): grpc.unary_stream_rpc_method_handler,
    (True, False): grpc.stream_unary_rpc_method_handler,
    (True, True): grpc.stream_stream_rpc_method_handler,
}


def presented(metadata: Sequence[tuple[str, Any]] | None) -> str | None:
    """The key in a call's metadata: `authorization: Bearer KEY`, or `x-api-key`."""
    held = dict(metadata or ())
    given = held.get("authorization")
    if given is not None:
        scheme, _, key = given.partition(" ")
        return key.strip() if scheme.lower() == "bearer" else None
    key = held.get("x-api-key")
    return key if isinstance(key, str) else None


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps every method."""

    def __init__(self, keys: Keys = OPEN) -> None:
        self._keys = keys

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method's handler, guarded; one that refuses if the key does not do."""
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        kind = (handler.request_streaming, handler.response_streaming)
        method = handler_call_details.method
        try:
            principal = self._admit(method, handler_call_details.invocation_metadata)
        except RequestError as error:
            # No deserializer: what an unknown caller sends is not even read as a message.
            return _MAKE[kind](_refusing(failure(error)), None, handler.response_serializer)
        inner = (
            handler.unary_unary
            or handler.unary_stream
            or handler.stream_unary
            or handler.stream_stream
        )
        traced = dict(handler_call_details.invocation_metadata or ()).get("traceparent")
        guarded = _guarded(inner, method, principal, traced, handler.request_streaming)
        decode = _decoder(handler.request_deserializer)
        return _MAKE[kind](guarded, decode, handler.response_serializer)

    def _admit(self, method: str, metadata: Sequence[tuple[str, Any]] | None) -> Principal:
        if method in OPEN_METHODS:
            return LOCAL
        check = self._keys.check_admin if method in ADMIN_METHODS else self._keys.check
        return check(presented(metadata))


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return None

    return decoded


def _refusing(error: m.Error) -> Callable[..., Any]:
    async def refuse(request: Any, context: Any) -> None:
        await context.abort(*status(error))

    return refuse


class _Garbage(Exception):
    """A message of a client's stream can't be decoded."""


async def _readable(requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
    async for request in requests:
        if request is None:
            raise _Garbage
        yield request


def _guarded(
    inner: Callable[[Any, Any], Any],
    method: str,
    principal: Principal,
    traced: str | None,
    streaming: bool,
) -> Callable[..., Any]:
    async def guarded(request: Any, context: Any) -> Any:
        error = _GARBAGE
        if request is not None:
            caller.set(principal)
            traces.caller.set(traced)
            try:
                answer = inner(_readable(request) if streaming else request, context)
                if not inspect.isasyncgen(answer):
                    return await answer
                async for message in answer:
                    await context.write(message)
                return None
            except grpc.aio.AbortError:
                raise  # an answer, not a failure
            except _Garbage:
                pass
            except grpc.aio.InternalError:
                # What could not be sent, as the client has just left: grpc knows, and so do we.
                raise asyncio.CancelledError from None
            except NotImplementedError:  # what generated code raises for a method left out
                told = "this method is not served"
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, told)
            except Exception:
                log.exception("%s failed", method)
                error = _FAILED
        with contextlib.suppress(grpc.aio.InternalError):
            await context.abort(*status(error))

    return guarded
