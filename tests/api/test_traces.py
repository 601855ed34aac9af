"""Traces: one span per request, below its caller's, without a word of the prompt."""

from __future__ import annotations

import asyncio

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from spec_serve.api.traces import Traces, caller, exporter
from spec_serve.spec.request import (
    Finished,
    Reason,
    Request,
    RequestError,
    RequestTimings,
    Started,
    Usage,
)

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


def ended(request: Request, index: int, reason: Reason = "stop") -> Finished:
    error = RequestError("", "late", "timeout") if reason == "error" else None
    timings = RequestTimings(1.0, 9.0, 10.0, 90.0)
    return Finished(request, index, reason, None, Usage(5, 2, 7), timings, error)


@pytest.fixture
def memory() -> InMemorySpanExporter:
    return InMemorySpanExporter()


def test_one_span_per_request_below_the_callers(memory: InMemorySpanExporter) -> None:
    traces = Traces(SimpleSpanProcessor(memory), "m")
    request = Request("a", [1, 2], n=2, trace=PARENT)
    traces.observe([Started(request, 0, 2, 1.0), ended(request, 0)])
    assert memory.get_finished_spans() == ()
    traces.observe([ended(request, 1)])
    (span,) = memory.get_finished_spans()
    assert span.context is not None and span.parent is not None and span.attributes is not None
    assert f"{span.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert f"{span.parent.span_id:016x}" == "b7ad6b7169203331"
    assert span.attributes["gen_ai.usage.output_tokens"] == 14
    assert span.attributes["specserve.cached_tokens"] == 2
    assert span.end_time is not None and span.start_time is not None
    assert span.end_time - span.start_time == 100_000_000
    assert not traces._choices


@pytest.mark.parametrize("trace", [None, "", "nonsense", PARENT[:-1], PARENT.replace("b7", "zz"),
                                   "00-" + "0" * 32 + "-b7ad6b7169203331-01"])  # fmt: skip
def test_what_names_no_caller_begins_a_trace(
    memory: InMemorySpanExporter, trace: str | None
) -> None:
    traces = Traces(SimpleSpanProcessor(memory), "m")
    traces.observe([ended(Request("a", [1], trace=trace), 0)])
    (span,) = memory.get_finished_spans()
    assert span.parent is None


def test_a_failure_is_told_by_its_code(memory: InMemorySpanExporter) -> None:
    traces = Traces(SimpleSpanProcessor(memory), "m")
    traces.observe([ended(Request("a", [1]), 0, "error")])
    (span,) = memory.get_finished_spans()
    assert (span.status.status_code, span.status.description) == (StatusCode.ERROR, "timeout")


def test_the_caller_belongs_to_the_task_that_serves_it() -> None:
    async def one(name: str) -> str | None:
        caller.set(name)
        await asyncio.sleep(0)
        return caller.get()

    async def go() -> list[str | None]:
        return list(await asyncio.gather(*(one(name) for name in "abc")))

    assert asyncio.run(go()) == ["a", "b", "c"] and caller.get() is None


def test_a_bad_address_names_the_setting() -> None:
    with pytest.raises(ValueError, match="otel-endpoint: must be an http"):
        exporter("localhost:4318")
