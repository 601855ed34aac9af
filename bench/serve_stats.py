"""Figures of a load test out of what became of its requests.

Definitions: time to first token runs from when a request was due; the time between tokens of a
chunk of k is a k-th of the gap before it, the chunk's gap is told apart; a request is good if it
was answered, its first token came in time, and so did the others on average. Rates are counted
over the steady part: from the first answer to the last arrival, if that is most of it.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from spec_serve.bench.serve_ask import REFUSED, Outcome

SHARES = (0.5, 0.9, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class Slo:
    """What a good answer keeps, in milliseconds: to the first token, and between tokens (mean)."""

    ttft_ms: float = 1000.0
    itl_ms: float = 100.0


def percentile(ordered: Sequence[float], share: float) -> float:
    """The smallest value that at least `share` of the ordered values do not exceed; 0 if none."""
    if not ordered:
        return 0.0
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]


def spread(values: Sequence[float]) -> dict[str, float]:
    """mean, p50, p90, p95, p99, max."""
    ordered = sorted(values)
    made = {"mean": sum(ordered) / len(ordered) if ordered else 0.0}
    made |= {f"p{round(share * 100)}": percentile(ordered, share) for share in SHARES}
    return made | {"max": ordered[-1] if ordered else 0.0}


def ttft_ms(outcome: Outcome) -> float:
    """From when it was due to its first token."""
    return (outcome.first - outcome.due) * 1e3


def chunk_gaps_ms(outcome: Outcome) -> list[float]:
    """Between neighbouring chunks."""
    times = [at for at, _ in outcome.arrivals]
    return [(b - a) * 1e3 for a, b in zip(times, times[1:], strict=False)]


def token_gaps_ms(outcome: Outcome) -> list[float]:
    """Between neighbouring tokens: a chunk's gap, shared by its tokens."""
    made: list[float] = []
    for gap, (_, tokens) in zip(chunk_gaps_ms(outcome), outcome.arrivals[1:], strict=True):
        made += [gap / tokens] * tokens
    return made


def mean_itl_ms(outcome: Outcome) -> float:
    """Time per token after the first chunk; 0 for an answer of one chunk."""
    if len(outcome.arrivals) < 2:
        return 0.0
    after = sum(tokens for _, tokens in outcome.arrivals[1:])
    return (outcome.arrivals[-1][0] - outcome.first) * 1e3 / after


def good(outcome: Outcome, slo: Slo) -> bool:
    """Whether it counts for goodput."""
    if not outcome.fine or not outcome.arrivals:
        return False
    return ttft_ms(outcome) <= slo.ttft_ms and mean_itl_ms(outcome) <= slo.itl_ms


def steady(outcomes: Sequence[Outcome]) -> tuple[float, float]:
    """The part of the load over which rates are counted: (begin, end) in seconds."""
    ends = [outcome.ended for outcome in outcomes if outcome.fine]
    last_due = max((outcome.due for outcome in outcomes), default=0.0)
    if not ends:
        return 0.0, last_due
    if last_due - min(ends) >= 0.5 * max(ends):
        return min(ends), last_due
    return 0.0, max(ends)


def figures(outcomes: Sequence[Outcome], slo: Slo) -> dict[str, Any]:
    """Everything a report shows of one load, ready for JSON."""
    fine = [outcome for outcome in outcomes if outcome.fine]
    begin, end = steady(outcomes)
    length = max(end - begin, 1e-9)
    inside = [outcome for outcome in fine if begin <= outcome.ended <= end]
    span = max((outcome.ended for outcome in outcomes), default=0.0)
    tokens = sum(
        count for o in outcomes for at, count in o.arrivals if begin <= at <= end
    )
    steps = sum(outcome.steps for outcome in fine)
    drafted = sum(outcome.drafted for outcome in fine)
    accepted = sum(outcome.accepted for outcome in fine)
    stepped = sum(outcome.tokens for outcome in fine if outcome.steps)
    prompt = sum(outcome.prompt_tokens for outcome in fine)
    refused = [o for o in outcomes if o.code in REFUSED]
    return {
        "requests": len(outcomes),
        "answered": len(fine),
        "left": sum(outcome.left for outcome in outcomes),
        "errors": dict(Counter(o.code for o in outcomes if o.code).most_common()),
        "seconds": span,
        "steady_from_s": begin,
        "steady_to_s": end,
        "requests_per_s": len(inside) / length,
        "goodput_per_s": sum(good(outcome, slo) for outcome in inside) / length,
        "good_share": sum(good(o, slo) for o in outcomes) / max(1, len(outcomes)),
        "tokens_per_s": tokens / length,
        "completion_tokens": sum(outcome.tokens for outcome in fine),
        "prompt_tokens": prompt,
        "cached_share": sum(outcome.cached_tokens for outcome in fine) / max(1, prompt),
        "ttft_ms": spread([ttft_ms(o) for o in fine if o.arrivals]),
        "itl_ms": spread([gap for o in fine for gap in token_gaps_ms(o)]),
        "chunk_ms": spread([gap for o in fine for gap in chunk_gaps_ms(o)]),
        "e2e_ms": spread([(o.ended - o.due) * 1e3 for o in fine]),
        "refused_ms": spread([(o.ended - o.sent) * 1e3 for o in refused]),
        "lag_ms": spread([(o.sent - o.due) * 1e3 for o in outcomes]),
        "most_at_once": most_at_once(outcomes),
        "tokens_per_chunk": _ratio(
            sum(outcome.tokens for outcome in fine), sum(len(o.arrivals) for o in fine)
        ),
        "tokens_per_step": _ratio(stepped, steps),
        "acceptance": _ratio(accepted, drafted),
        "drafted": drafted,
        "accepted": accepted,
    }


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None


def at_once(outcomes: Sequence[Outcome]) -> list[tuple[float, int]]:
    """(time, requests that ran from then on), at every change."""
    changes = Counter[float]()
    for outcome in outcomes:
        changes[outcome.sent] += 1
        changes[outcome.ended] -= 1
    running, made = 0, []
    for at in sorted(changes):
        running += changes[at]
        made.append((at, running))
    return made


def most_at_once(outcomes: Sequence[Outcome]) -> int:
    """How many ran at once at most."""
    return max((running for _, running in at_once(outcomes)), default=0)


def by_category(outcomes: Sequence[Outcome], slo: Slo) -> list[dict[str, Any]]:
    """A line per category of the data set."""
    made = []
    for name in sorted({outcome.category for outcome in outcomes}):
        part = figures([o for o in outcomes if o.category == name], slo)
        made.append(
            {
                "category": name,
                "requests": part["requests"],
                "answered": part["answered"],
                "ttft p50": part["ttft_ms"]["p50"],
                "ttft p99": part["ttft_ms"]["p99"],
                "itl p50": part["itl_ms"]["p50"],
                "itl p99": part["itl_ms"]["p99"],
                "tok/step": part["tokens_per_step"],
                "accept": part["acceptance"],
            }
        )
    return made
