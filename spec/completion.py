"""Events of finished requests gathered into one record per choice, for one-shot use and tests."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from spec_serve.spec.request import (
    Constrained,
    Delta,
    Event,
    Finished,
    PromptScored,
    Reason,
    Request,
    RequestError,
    RequestTimings,
    StepRecord,
    TokenLogprob,
    Usage,
)


@dataclass(slots=True)
class Completion:
    """Everything the engine said about one choice."""

    request: Request
    index: int
    tokens: list[int] = field(default_factory=list)
    reason: Reason = "error"
    matched: int | str | None = None
    usage: Usage = field(default_factory=lambda: Usage(0, 0, 0))
    timings: RequestTimings = field(default_factory=lambda: RequestTimings(0, 0, 0, 0))
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None
    steps: list[StepRecord] = field(default_factory=list)
    error: RequestError | None = None
    constraint: Constrained | None = None


def collect(requests: Sequence[Request], events: Iterable[Event]) -> list[Completion]:
    """One Completion per choice, requests in the order given, choices by index."""
    made = {(r.id, i): Completion(r, i) for r in requests for i in range(r.n)}
    for event in events:
        completion = made.get((event.request.id, event.index))
        if completion is None:
            continue
        match event:
            case Delta():
                completion.tokens += event.tokens
                completion.steps.append(event.step)
                if event.logprobs is not None:
                    completion.logprobs = (completion.logprobs or []) + event.logprobs
            case PromptScored():
                completion.prompt_logprobs = event.logprobs
            case Finished():
                completion.reason, completion.matched = event.reason, event.matched
                completion.usage, completion.timings = event.usage, event.timings
                completion.error = event.error
                completion.constraint = event.constraint
            case _:
                pass
    return list(made.values())
