"""What every gRPC call is guarded by: bytes that are no message, and failures that are our own.

grpc.aio tells the client an exception's class and text, and the log a traceback, even for garbage
a client sent. Here garbage is the client's INVALID_ARGUMENT, and a failure is told without
particulars and logged once. Knows no method.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Awaitable, Callable
from typing import Any

import grpc
from google.protobuf.message import DecodeError

from spec_serve.api import messages as m
from spec_serve.api.grpc_convert import status

log = logging.getLogger("spec_serve.grpc")

_GARBAGE = m.Error("invalid_request", "the message can't be decoded")
_FAILED = m.Error("engine_error", "the call failed in the server; its log says more")


class Guard(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """Wraps the methods that take one message; streams of messages are left alone."""

    async def intercept_service(
        self, continuation: Callable[[Any], Awaitable[Any]], handler_call_details: Any
    ) -> Any:
        """The method's handler, guarded."""
        handler = await continuation(handler_call_details)
        if handler is None or handler.request_streaming:
            return handler
        inner = handler.unary_stream if handler.response_streaming else handler.unary_unary
        if not inspect.iscoroutinefunction(inner):
            return handler
        make = (
            grpc.unary_stream_rpc_method_handler
            if handler.response_streaming
            else grpc.unary_unary_rpc_method_handler
        )
        return make(
            _guarded(inner, handler_call_details.method),
            _decoder(handler.request_deserializer),
            handler.response_serializer,
        )


def _decoder(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decoded(data: bytes) -> Any:
        try:
            return decode(data)
        except DecodeError:
            return None

    return decoded


def _guarded(inner: Callable[[Any, Any], Awaitable[Any]], method: str) -> Callable[..., Any]:
    async def guarded(request: Any, context: Any) -> Any:
        error = _GARBAGE
        if request is not None:
            try:
                return await inner(request, context)
            except grpc.aio.AbortError:
                raise  # an answer, not a failure
            except Exception:
                log.exception("%s failed", method)
                error = _FAILED
        await context.abort(*status(error))

    return guarded
