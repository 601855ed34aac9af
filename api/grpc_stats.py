"""The engine's counters as gRPC tells them: a snapshot, and a stream of samples with rates.

Knows the link's counters; asks nothing of the engine that would disturb a step.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

from spec_serve.api import messages as m
from spec_serve.api.proto import specserve_pb2 as pb
from spec_serve.api.service import Service
from spec_serve.spec.stats import EngineStats

MIN_MS, MAX_MS, USUAL_MS = 100, 60_000, 1000
_NAMES = [field.name for field in pb.ServerStats.DESCRIPTOR.fields]


def server_stats(stats: EngineStats) -> pb.ServerStats:
    """The counters as a message."""
    return pb.ServerStats(**{name: getattr(stats, name) for name in _NAMES})


def sample(before: EngineStats, now: EngineStats, seconds: float) -> pb.StatsSample:
    """What happened in so many seconds. Rates without a divisor are 0."""

    def share(part: str, whole: str) -> float:
        of = getattr(now, whole) - getattr(before, whole)
        return max(getattr(now, part) - getattr(before, part), 0) / of if of > 0 else 0.0

    def rate(name: str) -> float:
        grown = getattr(now, name) - getattr(before, name)  # a restarted engine counts anew
        return max(grown, 0) / seconds if seconds > 0 else 0.0

    return pb.StatsSample(
        stats=server_stats(now),
        interval_s=seconds,
        requests_per_s=rate("requests"),
        steps_per_s=rate("steps"),
        tokens_per_s=rate("tokens_out"),
        tokens_per_step=share("tokens_out", "steps"),
        acceptance_rate=share("accepted", "drafted"),
        prefix_hit_rate=share("prefix_hit_tokens", "prompt_tokens"),
    )


async def samples(service: Service, interval_ms: int) -> AsyncIterator[pb.StatsSample]:
    """One at once, then one per interval, for ever. Raises BadMessage for an odd interval."""
    interval = (interval_ms or USUAL_MS) / 1000
    if not MIN_MS <= interval * 1000 <= MAX_MS:
        told = f"interval_ms: must be from {MIN_MS} to {MAX_MS}, got {interval_ms}"
        raise m.BadMessage("interval_ms", told)
    before, then = EngineStats(), service.started
    while True:
        now, at = service.link.stats().copy(), time.monotonic()
        made = sample(before, now, at - then)
        made.draining = service.draining
        yield made
        before, then = now, at
        await asyncio.sleep(interval)
