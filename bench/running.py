"""Runs one request on an engine in this process and keeps what a client would have seen when."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count
from time import perf_counter

from spec_serve.spec.engine import Engine
from spec_serve.spec.request import (
    Constrained,
    Constraint,
    Delta,
    Finished,
    Request,
    RequestTimings,
    Sampling,
    Speculation,
    StepRecord,
    Stopping,
    Usage,
)

_ids = count()


@dataclass(slots=True)
class Run:
    """One answer. arrivals[i]: seconds from submission to token i; steps as the engine reports."""

    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    steps: list[StepRecord] = field(default_factory=list)
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    timings: RequestTimings = field(default_factory=lambda: RequestTimings(0, 0, 0, 0))
    reason: str = ""
    constraint: Constrained | None = None

    @property
    def ttft_ms(self) -> float:
        return self.arrivals[0] * 1e3

    @property
    def decode_s(self) -> float:
        return self.arrivals[-1] - self.arrivals[0]

    @property
    def tokens_per_s(self) -> float:
        """Tokens after the first per second of decoding; 0 if there was only one."""
        return (len(self.tokens) - 1) / self.decode_s if self.decode_s > 0 else 0.0

    @property
    def accepted(self) -> int:
        return sum(step.accepted for step in self.steps)

    @property
    def drafted(self) -> int:
        return sum(step.drafted for step in self.steps)


def run(
    engine: Engine,
    prompt: Sequence[int],
    max_tokens: int,
    *,
    speculation: Speculation | None = None,
    sampling: Sampling | None = None,
    eos: frozenset[int] = frozenset(),
    salt: str = "",
    constraint: Constraint | None = None,
) -> Run:
    """Serve one request alone, stepping the engine in this thread."""
    request = Request(
        f"bench{next(_ids)}",
        list(prompt),
        sampling or Sampling(),
        Stopping(max_tokens=max_tokens, eos=eos),
        speculation or Speculation(),
        salt=salt,
        constraint=constraint,
    )
    result = Run()
    begun = perf_counter()
    engine.submit(request)
    while not engine.idle():
        for event in engine.step():
            if isinstance(event, Delta):
                now = perf_counter() - begun
                result.tokens += event.tokens
                result.arrivals += [now] * len(event.tokens)
                result.steps.append(event.step)
            elif isinstance(event, Finished):
                result.usage, result.timings = event.usage, event.timings
                result.reason, result.constraint = event.reason, event.constraint
                if event.error is not None:
                    raise event.error
    return result
