"""From the runs of a comparison to figures: medians, spreads, ratios, per engine and category.

A speed is the median over prompts of each prompt's median over repeats; the spread is that of the
prompts' medians. Knows the JSON that compare.py makes.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import median
from typing import Any

from spec_serve.bench.peers.compare import speed

ALL = "all"
LONG = 128  # prompt tokens from which on a prefill's speed means something


@dataclass(frozen=True, slots=True)
class Figure:
    """Tokens per second of an engine on a category: the median, lowest and highest prompt."""

    speed: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Row:
    """One engine. by: category -> Figure, ALL among them. prefill: prompt tokens per second until
    the first token, over long prompts; None if there were none. same: share of the answers' tokens
    that equal the reference's, from the front."""

    engine: str
    by: dict[str, Figure]
    prefill: float | None
    same: float


def categories(report: dict[str, Any]) -> list[str]:
    """In the order of the prompts, ALL last where there are several."""
    found = list(dict.fromkeys(run["category"] for run in report["runs"]))
    return [*found, ALL] if len(found) > 1 else found


def rows(report: dict[str, Any]) -> list[Row]:
    """One per engine, in the order in which they ran."""
    return [_row(report, engine) for engine in report["order"] if _runs(report, engine)]


def _runs(report: dict[str, Any], engine: str) -> list[dict[str, Any]]:
    return [run for run in report["runs"] if run["engine"] == engine]


def _row(report: dict[str, Any], engine: str) -> Row:
    runs = _runs(report, engine)
    by = {name: figure for name in categories(report) if (figure := _figure(runs, name))}
    fast = [run["prompt_tokens"] / run["first_s"] for run in runs if run["prompt_tokens"] >= LONG]
    made = sum(run["tokens"] for run in runs)
    same = sum(run["same"] for run in runs)
    return Row(engine, by, median(fast) if fast else None, same / made if made else 0.0)


def _figure(runs: list[dict[str, Any]], category: str) -> Figure | None:
    held: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        if category in (ALL, run["category"]) and (found := speed(run)):
            held[run["prompt"]].append(found)
    speeds = [median(values) for values in held.values()]
    return Figure(median(speeds), min(speeds), max(speeds)) if speeds else None


def ratios(made: list[Row], ours: str, theirs: str) -> dict[str, tuple[float, str]]:
    """category -> (speed of `ours` over the fastest engine whose name begins with `theirs`, its
    name); without the categories that one of them lacks."""
    mine = next((row for row in made if row.engine == ours), None)
    found: dict[str, tuple[float, str]] = {}
    for category, figure in mine.by.items() if mine is not None else ():
        others = [row for row in made if row.engine.startswith(theirs) and category in row.by]
        if others:
            best = max(others, key=lambda row: row.by[category].speed)
            found[category] = (figure.speed / best.by[category].speed, best.engine)
    return found
