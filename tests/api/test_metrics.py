"""Metrics: what events add up to, and what a scrape, a router and an operator are told."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from spec_serve.api import metrics
from spec_serve.api.metrics import COUNTS, Histogram, Meter, families, vllm_families
from spec_serve.spec.request import (
    Delta,
    Event,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Started,
    StepRecord,
    Usage,
)
from spec_serve.spec.stats import EngineStats
from tests.api.serving import served


def delta(request: Request, tokens: int, drafted: int, index: int = 0) -> Delta:
    sources = {"lookup": (drafted, tokens - 1)} if drafted else {}
    step = StepRecord(1, drafted, tokens - 1, sources, 1, 2, 3, 1, [], [])
    return Delta(request, index, [7] * tokens, None, step)


def finished(
    request: Request, reason: Any, tokens: int, error: RequestError | None = None
) -> Event:
    usage, timings = Usage(40, 8, tokens), RequestTimings(2.0, 28.0, 30.0, 470.0)
    return Finished(request, 0, reason, None, usage, timings, error)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    now = [100.0]
    monkeypatch.setattr(metrics, "monotonic", lambda: now[0])
    yield now


def flat(found: Any) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in found
        for sample in family.samples
    }


def test_buckets_count_up_to_their_bound_and_one_more() -> None:
    held = Histogram(COUNTS)
    for value in (1.0, 1.5, 2.0, 99_999.0):
        held.add(value)
    held.add(3.0, 2)
    told = dict(held.buckets())
    assert (told["1.0"], told["2.0"], told["4.0"], told["+Inf"]) == (1, 3, 5, 6)
    assert held.sum == 1 + 1.5 + 2 + 99_999 + 6 and held.total == 6


def test_a_request_adds_up(clock: list[float]) -> None:
    meter, request = Meter(), Request("a", [1, 2])
    meter.observe([Started(request, 0, 8, 2.0), delta(request, 1, 0)])
    clock[0] += 0.3
    meter.observe([delta(request, 3, 5)])
    clock[0] += 0.2
    meter.observe([delta(request, 2, 4), finished(request, "stop", 6)])
    stats = EngineStats(running=1, kv_used=5, kv_total=10, requests=1, tokens_out=6)
    told = flat(families(meter, stats, 9.0))
    assert told["specserve_time_to_first_token_seconds_sum", ()] == pytest.approx(0.030)
    assert told["specserve_request_seconds_sum", ()] == pytest.approx(0.5)
    # Three tokens 0.1 s each and two of 0.1 s: five gaps.
    assert told["specserve_inter_token_seconds_count", ()] == 5
    assert told["specserve_inter_token_seconds_sum", ()] == pytest.approx(0.5)
    assert told["specserve_queue_seconds_sum", ()] == pytest.approx(0.002)
    assert told["specserve_drafted_tokens_total", (("source", "lookup"),)] == 9
    assert told["specserve_accepted_tokens_total", (("source", "lookup"),)] == 3
    assert told["specserve_accepted_tokens_per_position_total", (("position", "0"),)] == 2
    assert told["specserve_accepted_tokens_per_position_total", (("position", "1"),)] == 1
    assert told["specserve_finished_total", (("reason", "stop"),)] == 1
    assert told["specserve_completion_tokens_total", ()] == 6
    vllm = flat(vllm_families(meter, stats, "m", 10))
    name = (("model_name", "m"),)
    assert vllm["vllm:spec_decode_num_drafts_total", name] == 2
    assert vllm["vllm:spec_decode_num_draft_tokens_total", name] == 9
    assert vllm["vllm:spec_decode_num_accepted_tokens_total", name] == 3
    assert vllm["vllm:kv_cache_usage_perc", name] == 0.5
    assert vllm["vllm:num_requests_running", name] == 1
    assert vllm["vllm:request_success_total", (("finished_reason", "stop"), *name)] == 1


def test_failures_count_by_code_and_leave_nothing_behind(clock: list[float]) -> None:
    meter, request = Meter(), Request("a", [1, 2])
    late = RequestError("deadline", "has passed", "timeout")
    meter.observe([delta(request, 1, 0), finished(request, "error", 1, late)])
    meter.observe([delta(request, 1, 0), finished(request, "cancelled", 1)])
    assert meter.errors == {"timeout": 1} and meter.reasons["cancelled"] == 1
    assert meter.end_to_end.total == 0  # what was cut short says nothing about latency
    assert not meter._last


async def ask(url: str, method: str, path: str) -> tuple[int, str, str]:
    """Status, content type and body."""
    host, port = url.removeprefix("ws://").partition("/")[0].split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
    head, _, body = (await reader.read()).decode().partition("\r\n\r\n")
    writer.close()
    lines = head.split("\r\n")
    kind = next(line for line in lines if line.startswith("content-type"))
    return int(lines[0].split()[1]), kind.partition(": ")[2], body


def test_a_server_tells_them_in_prometheus_text() -> None:
    async def go() -> tuple[int, str, str]:
        from spec_serve.client import Client

        async with served() as (_, url):
            async with Client(url) as client:
                async for _event in client.generate(prompt="hello world"):
                    pass
            return await ask(url, "GET", "/metrics")

    status, kind, body = asyncio.run(go())
    assert status == 200 and kind.startswith("text/plain")
    told = flat(text_string_to_metric_families(body))
    assert told["specserve_requests_total", ()] == 1
    assert told["specserve_completion_tokens_total", ()] == len("hello world") + 1
    assert told["specserve_time_to_first_token_seconds_count", ()] == 1
    assert told["specserve_finished_total", (("reason", "stop"),)] == 1
    assert not any(name.startswith("vllm:") for name, _ in told)


def test_routers_are_told_load_and_model() -> None:
    async def go() -> list[Any]:
        async with served() as (_, url):
            return [
                json.loads((await ask(url, "GET", path))[2])
                for path in ("/v1/loads?include=core", "/server_info", "/model_info")
            ]

    loads, server, model = asyncio.run(go())
    assert loads["loads"][0]["num_running_reqs"] == 0 and loads["dp_rank_count"] == 1
    assert loads["loads"][0]["max_total_num_tokens"] == 4096
    assert server["served_model_name"] == "echo" and server["stats"]["requests"] == 0
    assert server["context_length"] == 4096
    assert model["is_generation"] and model["max_context_length"] == 4096


def test_flushing_says_how_much_was_freed() -> None:
    async def go() -> tuple[int, str, str]:
        async with served() as (_, url):
            return await ask(url, "POST", "/flush_cache")

    status, _, body = asyncio.run(go())
    assert status == 200 and json.loads(body) == {"status": "flushed", "freed_tokens": 0}
