"""What is counted for Prometheus: the engine's counters, and times seen in the events of requests.

`Meter.observe` is the link's observer, called once per step with all its events; it adds to plain
arrays, and a scrape makes families of them. Own names begin with specserve_; on wish the names that
dashboards and routers know from vLLM are told too. Knows no transport; prompts and texts never
reach it.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from time import monotonic

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from spec_serve.spec.request import Delta, Event, Finished, Request, Started
from spec_serve.spec.stats import EngineStats

SECONDS = (
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0,
    25.0, 50.0, 100.0,
)  # fmt: skip
COUNTS = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0)
PER_STEP = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 12.0, 16.0, 24.0, 32.0)
MOST_TOKENS = 64  # per step; more count as so many
MAX_POSITIONS = 32  # depths told apart; deeper ones count with the last


class Histogram:
    """Counts per bucket, cheap to add to. bounds: upper ends, ascending."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, value: float, times: int = 1) -> None:
        """Count `value`, `times` over."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    @property
    def total(self) -> int:
        """How many were added."""
        return sum(self.counts)

    def buckets(self) -> list[tuple[str, float]]:
        """(upper end, how many up to it), as Prometheus wants them."""
        told, running = [], 0
        for bound, count in zip((*self.bounds, None), self.counts, strict=True):
            running += count
            told.append(("+Inf" if bound is None else repr(float(bound)), float(running)))
        return told


class Meter:
    """Everything counted since the start. All methods belong to the loop's thread."""

    def __init__(self) -> None:
        self.queue = Histogram(SECONDS)
        self.first_token = Histogram(SECONDS)
        self.inter_token = Histogram(SECONDS)
        self.end_to_end = Histogram(SECONDS)
        self.prompt = Histogram(COUNTS)
        self.completion = Histogram(COUNTS)
        self.reasons: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0}
        self.errors: dict[str, int] = {}
        self.drafted: dict[str, int] = {}
        self.accepted: dict[str, int] = {}
        self.drafts = self.draft_tokens = self.accepted_tokens = 0
        self._runs = [0] * (MAX_POSITIONS + 1)  # steps by how many guesses they accepted
        self._tokens = [0] * (MOST_TOKENS + 1)  # steps by how many tokens they brought
        # When each choice got its last tokens (choices behind the first have their index beside the
        # request), and when the last step was.
        self._last: dict[Request | tuple[Request, int], float] = {}
        self._before = 0.0

    @property
    def by_position(self) -> list[int]:
        """Guesses accepted at each depth: steps that accepted more than it."""
        return [sum(self._runs[depth:]) for depth in range(1, MAX_POSITIONS + 1)]

    @property
    def tokens_per_step(self) -> Histogram:
        """Tokens a choice got in a verify step."""
        made = Histogram(PER_STEP)
        for tokens, steps in enumerate(self._tokens):
            if steps:
                made.add(tokens, steps)
        return made

    def observe(self, events: Sequence[Event]) -> None:
        """Count one step's events; a failure's code, too, when it is the engine's."""
        # One loop without calls: it sees every delta of every stream.
        now, before = monotonic(), self._before
        last, tokens, runs = self._last, self._tokens, self._runs
        drafted_by, accepted_by = self.drafted, self.accepted
        drafts = draft_tokens = accepted_tokens = 0
        gaps: dict[int, int] = {}  # tokens -> choices that got so many, after some the step before
        for event in events:
            if type(event) is not Delta:
                self._rare(event)
                continue
            key = (event.request, event.index) if event.index else event.request
            step, count = event.step, len(event.tokens)
            earlier = last.get(key)
            last[key] = now
            if earlier == before:
                gaps[count] = gaps.get(count, 0) + 1
            elif earlier is not None and count:
                self.inter_token.add((now - earlier) / count, count)
            tokens[count if count < MOST_TOKENS else MOST_TOKENS] += 1
            if guesses := step.drafted:
                accepted = step.accepted
                drafts += 1
                draft_tokens += guesses
                accepted_tokens += accepted
                runs[accepted if accepted < MAX_POSITIONS else MAX_POSITIONS] += 1
                for name, (drafted, accepted) in step.sources.items():
                    drafted_by[name] = drafted_by.get(name, 0) + drafted
                    accepted_by[name] = accepted_by.get(name, 0) + accepted
        self._before = now
        self.drafts += drafts
        self.draft_tokens += draft_tokens
        self.accepted_tokens += accepted_tokens
        for count, choices in gaps.items():
            if count:
                self.inter_token.add((now - before) / count, count * choices)

    def _rare(self, event: Event) -> None:
        if type(event) is Finished:
            self._finished(event)
        elif type(event) is Started:
            self.queue.add(event.queue_ms / 1e3)

    def _finished(self, event: Finished) -> None:
        key = (event.request, event.index) if event.index else event.request
        self._last.pop(key, None)
        if event.reason == "error":
            code = event.error.code if event.error is not None else "engine_error"
            self.refuse(code)
            return
        self.reasons[event.reason] += 1
        if event.reason == "cancelled":
            return
        timings, usage = event.timings, event.usage
        self.first_token.add(timings.ttft_ms / 1e3)
        self.end_to_end.add((timings.ttft_ms + timings.decode_ms) / 1e3)
        self.completion.add(usage.completion_tokens)
        if event.index == 0:
            self.prompt.add(usage.prompt_tokens)

    def refuse(self, code: str) -> None:
        """Count a request that was refused or failed."""
        self.errors[code] = self.errors.get(code, 0) + 1


def families(meter: Meter, stats: EngineStats, uptime_s: float) -> Iterator[Metric]:
    """Under our own names; stats: the engine's, at this moment."""
    gauges = {
        "running": ("choices running", stats.running),
        "waiting": ("choices waiting", stats.waiting),
        "kv_used_tokens": ("K/V slots that can't be had back at once", stats.kv_used),
        "kv_total_tokens": ("K/V slots there are", stats.kv_total),
        "uptime_seconds": ("seconds since the server began", uptime_s),
    }
    for name, (said, value) in gauges.items():
        yield GaugeMetricFamily(f"specserve_{name}", said, float(value))
    counters = {
        "requests": ("requests admitted", stats.requests),
        "preemptions": ("choices sent back to wait for room", stats.preempted),
        "steps": ("steps of the engine", stats.steps),
        "prompt_tokens": ("tokens of prompts", stats.prompt_tokens),
        "prefix_hit_tokens": ("tokens of prompts found in the cache", stats.prefix_hit_tokens),
        "completion_tokens": ("tokens delivered", stats.tokens_out),
        "host_microseconds": ("host time of the engine's steps", stats.host_us),
    }
    for name, (said, value) in counters.items():
        yield CounterMetricFamily(f"specserve_{name}", said, float(value))
    yield from _labelled("specserve_finished", "choices by how they ended", "reason", meter.reasons)
    yield from _labelled("specserve_errors", "requests refused or failed", "code", meter.errors)
    yield from _labelled("specserve_drafted_tokens", "guesses verified", "source", meter.drafted)
    yield from _labelled("specserve_accepted_tokens", "guesses accepted", "source", meter.accepted)
    positions = {str(i): count for i, count in enumerate(meter.by_position) if count}
    yield from _labelled(
        "specserve_accepted_tokens_per_position", "guesses accepted by depth", "position", positions
    )
    histograms = {
        "queue_seconds": ("from arrival to admission", meter.queue),
        "time_to_first_token_seconds": ("from arrival to the first token", meter.first_token),
        "inter_token_seconds": ("a step's time over its tokens", meter.inter_token),
        "request_seconds": ("from arrival to the last token", meter.end_to_end),
        "request_prompt_tokens": ("prompt lengths", meter.prompt),
        "request_completion_tokens": ("completion lengths", meter.completion),
        "tokens_per_step": ("tokens a choice got in a verify step", meter.tokens_per_step),
    }
    for name, (said, held) in histograms.items():
        yield _histogram(f"specserve_{name}", said, held)


def vllm_families(
    meter: Meter, stats: EngineStats, model: str, kv_tokens: int
) -> Iterator[Metric]:
    """The same under the names that routers and dashboards made for vLLM ask for."""
    names, values = ["model_name"], [model]

    def gauge(name: str, said: str, value: float) -> Metric:
        made = GaugeMetricFamily(f"vllm:{name}", said, labels=names)
        made.add_metric(values, value)
        return made

    def counter(name: str, said: str, value: float, extra: dict[str, str] | None = None) -> Metric:
        extra = extra or {}
        made = CounterMetricFamily(f"vllm:{name}", said, labels=[*names, *extra])
        made.add_metric([*values, *extra.values()], value)
        return made

    used = stats.kv_used / stats.kv_total if stats.kv_total else 0.0
    yield gauge("num_requests_running", "choices running", stats.running)
    yield gauge("num_requests_waiting", "choices waiting", stats.waiting)
    yield gauge("kv_cache_usage_perc", "share of the K/V slots in use, 0 to 1", used)
    info = GaugeMetricFamily(
        "vllm:cache_config_info", "the K/V store", labels=["block_size", "num_gpu_blocks"]
    )
    info.add_metric(["1", str(kv_tokens)], 1.0)
    yield info
    yield counter("prompt_tokens", "tokens of prompts", stats.prompt_tokens)
    yield counter("generation_tokens", "tokens delivered", stats.tokens_out)
    yield counter("num_preemptions", "choices sent back to wait", stats.preempted)
    yield counter("prefix_cache_queries", "tokens looked up", stats.prompt_tokens)
    yield counter("prefix_cache_hits", "tokens found", stats.prefix_hit_tokens)
    yield counter("spec_decode_num_drafts", "steps with guesses", meter.drafts)
    yield counter("spec_decode_num_draft_tokens", "guesses verified", meter.draft_tokens)
    yield counter("spec_decode_num_accepted_tokens", "guesses accepted", meter.accepted_tokens)
    per_position = CounterMetricFamily(
        "vllm:spec_decode_num_accepted_tokens_per_pos", "guesses accepted by depth",
        labels=[*names, "position"],
    )  # fmt: skip
    for i, count in enumerate(meter.by_position):
        if count:
            per_position.add_metric([*values, str(i)], count)
    yield per_position
    success = CounterMetricFamily(
        "vllm:request_success", "choices by how they ended", labels=[*names, "finished_reason"]
    )
    for reason, count in meter.reasons.items():
        success.add_metric([*values, "abort" if reason == "cancelled" else reason], count)
    yield success
    for name, held in (
        ("time_to_first_token_seconds", meter.first_token),
        ("inter_token_latency_seconds", meter.inter_token),
        ("e2e_request_latency_seconds", meter.end_to_end),
        ("request_queue_time_seconds", meter.queue),
    ):
        yield _histogram(f"vllm:{name}", "as specserve's own", held, names, values)


def _labelled(name: str, said: str, label: str, held: dict[str, int]) -> Iterator[Metric]:
    made = CounterMetricFamily(name, said, labels=[label])
    for value, count in sorted(held.items()):
        made.add_metric([value], count)
    yield made


def _histogram(
    name: str, said: str, held: Histogram, labels: Sequence[str] = (), values: Sequence[str] = ()
) -> Metric:
    made = HistogramMetricFamily(name, said, labels=list(labels))
    made.add_metric(list(values), held.buckets(), held.sum)
    return made
