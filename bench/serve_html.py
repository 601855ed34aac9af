"""The report of a load test as one HTML file: tables and plots, nothing fetched from anywhere.

Takes figures and outcomes and computes nothing itself beyond what a plot needs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from spec_serve.bench.plots import Point, chart, shares
from spec_serve.bench.report import cell
from spec_serve.bench.serve_ask import Outcome
from spec_serve.bench.serve_stats import Slo, at_once, by_category, chunk_gaps_ms, ttft_ms

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --page: #fff; --soft: #d8dee4;
  --c0: #0969da; --c1: #bc4c00; --c2: #1a7f37; --c3: #8250df; --c4: #bf3989; --c5: #57606a; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --page: #0d1117; --soft: #30363d;
  --c0: #58a6ff; --c1: #f0883e; --c2: #3fb950; --c3: #bc8cff; --c4: #f778ba; --c5: #8b949e; } }
body { background: var(--page); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  max-width: 1180px; margin: 2em auto; padding: 0 1em; }
table { border-collapse: collapse; margin: 1em 0; display: block; overflow-x: auto; }
th, td { padding: .25em .8em; text-align: right; border-bottom: 1px solid var(--soft);
  white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(340px, 1fr)); gap: 1em; }
svg { width: 100%; height: auto; } svg text { fill: var(--ink); }
.title { font-weight: 600; font-size: 14px; } .tick { font-size: 11px; opacity: .8; }
.grid { stroke: var(--soft); } .mark { stroke: var(--ink); stroke-dasharray: 4 3; }
"""
SPREAD = ("mean", "p50", "p90", "p95", "p99", "max")
TIMES = (
    ("ttft_ms", "to the first token"),
    ("itl_ms", "between tokens"),
    ("chunk_ms", "between chunks"),
    ("e2e_ms", "whole answer"),
    ("refused_ms", "refusal"),
    ("lag_ms", "sent late by us"),
)


@dataclass(frozen=True, slots=True)
class Part:
    """One load: its name, figures and outcomes."""

    name: str
    figures: Mapping[str, Any]
    outcomes: Sequence[Outcome]


def page(options: Mapping[str, Any], parts: Sequence[Part], slo: Slo, found: str = "") -> str:
    """The whole file. found: a sentence on what a sweep found."""
    said = [f"<p>{escape(', '.join(f'{k} = {v}' for k, v in options.items()))}</p>"]
    if found:
        said.append(f"<p><strong>{escape(found)}</strong></p>")
    if len(parts) > 1:
        said += ["<h2>Loads</h2>", _table([overview(part) for part in parts]), _sweep(parts)]
    for part in parts:
        said.append(f"<h2>{escape(part.name)}</h2>")
        said += _part(part, slo)
    body = "\n".join(said)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>spec-serve bench serve</title><style>{STYLE}</style></head>"
        f"<body><h1>Load test</h1>\n{body}\n</body></html>\n"
    )


def overview(part: Part) -> dict[str, Any]:
    """One line about a load."""
    made = part.figures
    return {
        "load": part.name,
        "requests": made["requests"],
        "answered": made["answered"],
        "errors": ", ".join(f"{code} {count}" for code, count in made["errors"].items()) or "none",
        "req/s": made["requests_per_s"],
        "goodput/s": made["goodput_per_s"],
        "tok/s": made["tokens_per_s"],
        "ttft p50": made["ttft_ms"]["p50"],
        "ttft p99": made["ttft_ms"]["p99"],
        "itl p50": made["itl_ms"]["p50"],
        "itl p99": made["itl_ms"]["p99"],
        "tok/step": made["tokens_per_step"],
        "accept": made["acceptance"],
    }


def times(figures: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The spreads of a load, a line each."""
    return [
        {"ms": name, **{share: figures[key][share] for share in SPREAD}}
        for key, name in TIMES
        if figures[key]["max"] > 0
    ]


def _table(records: Sequence[Mapping[str, Any]]) -> str:
    if not records:
        return ""
    head = "".join(f"<th>{escape(name)}</th>" for name in records[0])
    rows = "".join(
        f"<tr>{''.join(f'<td>{escape(cell(value))}</td>' for value in record.values())}</tr>"
        for record in records
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _sweep(parts: Sequence[Part]) -> str:
    rated = sorted(
        (part.figures for part in parts if part.figures.get("rate")), key=lambda f: f["rate"]
    )
    if len(rated) < 2:
        return ""

    def over(*keys: str) -> list[Point]:
        made = []
        for figures in rated:
            value: Any = figures
            for key in keys:
                value = value[key]
            made.append((figures["rate"], value))
        return made

    plots = [
        chart("Answers and good answers", {"answered": over("requests_per_s"),
              "good": over("goodput_per_s")}, "requests/s offered", "requests/s"),
        chart("Time to first token", {"p50": over("ttft_ms", "p50"), "p99": over("ttft_ms", "p99")},
              "requests/s offered", "ms"),
        chart("Time between tokens", {"p50": over("itl_ms", "p50"), "p99": over("itl_ms", "p99")},
              "requests/s offered", "ms"),
        chart("Tokens", {"tokens": over("tokens_per_s")}, "requests/s offered", "tokens/s"),
    ]  # fmt: skip
    return f'<div class="plots">{"".join(plots)}</div>'


def _part(part: Part, slo: Slo) -> list[str]:
    figures, outcomes = part.figures, part.outcomes
    fine = [outcome for outcome in outcomes if outcome.fine and outcome.arrivals]
    said = [_table([overview(part)]), _table(times(figures))]
    categories = by_category(outcomes, slo)
    if len(categories) > 1:
        said.append(_table(categories))
    if not fine:
        return said
    gaps = [gap for outcome in fine for gap in chunk_gaps_ms(outcome)]
    failed = [(o.due, (o.ended - o.due) * 1e3) for o in outcomes if o.code]
    dots = {"first token": [(o.due, ttft_ms(o)) for o in fine]}
    if failed:
        dots["error"] = failed
    plots = [
        chart("Time to first token", {"": shares([ttft_ms(o) for o in fine])}, "ms", "% of answers",
              log_x=True, mark=slo.ttft_ms),
        chart("Time between chunks", {"": shares(gaps)}, "ms", "% of chunks", log_x=True),
        chart("Whole answer", {"": shares([(o.ended - o.due) * 1e3 for o in fine])}, "ms",
              "% of answers", log_x=True),
        chart("First token by arrival", dots, "seconds", "ms", kind="dots"),
        chart("Requests at once", {"": at_once(outcomes)}, "seconds", "requests", kind="step"),
        chart("Tokens per second", {"": per_second(outcomes)}, "seconds", "tokens/s",
              kind="step"),
    ]  # fmt: skip
    return [*said, f'<div class="plots">{"".join(plots)}</div>']


def per_second(outcomes: Sequence[Outcome]) -> list[Point]:
    """(second, tokens that came in it)."""
    counts: dict[int, int] = {}
    for outcome in outcomes:
        for at, tokens in outcome.arrivals:
            counts[int(at)] = counts.get(int(at), 0) + tokens
    return [(float(s), float(counts.get(s, 0))) for s in range(max(counts, default=-1) + 1)]
