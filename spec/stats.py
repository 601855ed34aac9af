"""The engine's counters; plain numbers, read by metrics and benches."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(slots=True)
class EngineStats:
    """Gauges (running, waiting, kv_*) and counters since start. Times in microseconds.

    requests are counted whole; running, waiting, finished, aborted and preempted are choices."""

    running: int = 0
    waiting: int = 0
    kv_used: int = 0
    kv_total: int = 0
    requests: int = 0
    finished: int = 0
    aborted: int = 0
    preempted: int = 0
    steps: int = 0
    tokens_out: int = 0
    drafted: int = 0
    accepted: int = 0
    prompt_tokens: int = 0
    prefix_hit_tokens: int = 0
    host_us: int = 0

    def copy(self) -> EngineStats:
        """A snapshot."""
        return replace(self)
