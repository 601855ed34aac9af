"""Traces for OpenTelemetry, if asked for: one span per request, with the times the engine measured.

Its parent is the caller's span, from the `traceparent` header or metadata, carried in a context
variable by the task that serves the call. Prompts and texts are never in a span. The SDK is an
extra (`spec-serve[otel]`) and imported only when an endpoint is configured.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from spec_serve.api.version import __version__
from spec_serve.spec.request import Event, Finished, Request

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import SpanProcessor

caller: ContextVar[str | None] = ContextVar("traceparent", default=None)
_HEADER = re.compile(r"00-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})")
_FAILED = "error"


class Traces:
    """Makes spans out of events. processor: where they go, from `exporter` or a test."""

    def __init__(self, processor: SpanProcessor, model: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider

        resource = Resource.create({"service.name": "spec-serve", "service.version": __version__})
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("spec_serve")
        self._model = model
        self._choices: dict[str, list[int]] = {}  # request -> choices left, tokens of the others

    def observe(self, events: Sequence[Event]) -> None:
        """The link's observer: a span for each request that ended with this step."""
        for event in events:
            if type(event) is Finished:
                request = event.request
                left = self._choices.setdefault(request.id, [request.n, 0])
                left[0] -= 1
                left[1] += event.usage.completion_tokens
                if not left[0]:  # the last choice tells for all
                    del self._choices[request.id]
                    self._span(event, left[1])

    def _span(self, event: Finished, tokens: int) -> None:
        from opentelemetry.trace import SpanKind, Status, StatusCode

        timings, usage, request = event.timings, event.usage, event.request
        ended = time.time_ns()
        took = timings.ttft_ms + timings.decode_ms
        span = self._tracer.start_span(
            "generate",
            context=parent_of(request),
            kind=SpanKind.SERVER,
            start_time=ended - int(took * 1e6),
            attributes={
                "gen_ai.request.model": self._model,
                "gen_ai.response.finish_reasons": [event.reason],
                "gen_ai.usage.input_tokens": usage.prompt_tokens,
                "gen_ai.usage.output_tokens": tokens,
                "specserve.request_id": request.id,
                "specserve.cached_tokens": usage.cached_tokens,
                "specserve.choices": request.n,
                "specserve.queue_ms": timings.queue_ms,
                "specserve.prefill_ms": timings.prefill_ms,
                "specserve.ttft_ms": timings.ttft_ms,
                "specserve.decode_ms": timings.decode_ms,
            },
        )
        if event.reason == _FAILED:
            code = event.error.code if event.error is not None else "engine_error"
            span.set_status(Status(StatusCode.ERROR, code))
        span.end(end_time=ended)

    def close(self) -> None:
        """Send what waits; at most for some seconds."""
        self._provider.shutdown()


def parent_of(request: Request) -> Any:
    """The OpenTelemetry context of the caller's span; None if it named none that can be read."""
    from opentelemetry.trace import (
        NonRecordingSpan,
        SpanContext,
        TraceFlags,
        set_span_in_context,
    )

    found = _HEADER.fullmatch(request.trace or "")
    if found is None or int(found[1], 16) == 0 or int(found[2], 16) == 0:
        return None
    trace, span, flags = (int(part, 16) for part in found.groups())
    told = SpanContext(trace, span, is_remote=True, trace_flags=TraceFlags(flags))
    return set_span_in_context(NonRecordingSpan(told))


def exporter(endpoint: str) -> SpanProcessor:
    """Batches over HTTP to an OTLP collector. ValueError for an address or package that lacks."""
    if not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"otel-endpoint: must be an http or https URL, not {endpoint!r}")
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        told = "otel-endpoint: needs an extra: pip install 'spec-serve[otel]'"
        raise ValueError(told) from error
    address = endpoint.rstrip("/")
    if not address.endswith("/v1/traces"):
        address += "/v1/traces"
    return BatchSpanProcessor(OTLPSpanExporter(endpoint=address, timeout=5))
