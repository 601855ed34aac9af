"""How a comparison is shown: Markdown (the README's table too) and a plot as a file of its own.

Knows figures.py; reads no model and runs nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

from spec_serve.bench.peers.figures import categories, ratios, rows

BEGIN, END = "<!-- bench peers: begin -->", "<!-- bench peers: end -->"
NONE_YET = "No comparison with other engines is recorded yet; `spec-serve bench peers` makes one."
OURS = "spec-serve/"
WIDTH, BAR, NAME = 640, 15, 170
STYLE = (
    "svg{background:#fff}text{font:12px system-ui,sans-serif;fill:#222}"
    ".own{fill:#2a6fdb}.other{fill:#a9b3c1}.spread{stroke:#444;stroke-width:1}"
    "@media(prefers-color-scheme:dark){svg{background:#16181d}text{fill:#ddd}"
    ".own{fill:#6aa5ff}.other{fill:#5b6573}.spread{stroke:#bbb}}"
)


def _speed(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def described(report: dict[str, Any]) -> str:
    """One line: model, machine, when, how much."""
    held, options = report["machine"], report["options"]
    prompts = len({run["prompt"] for run in report["runs"]})
    return (
        f"{report['target']}{' with draft ' + report['draft'] if report['draft'] else ''}, "
        f"{held['cpu']} ({held['cores']} cores, {held['sets'] or 'no known extensions'}, "
        f"{held['memory_gib']:.0f} GiB, load {held['load']} at the beginning), "
        f"{report['made'][:10]}, {prompts} prompts, {options['max_tokens']} tokens, "
        f"{options['repeats']} repeats, greedy, {options['threads']} threads"
    )


def table(report: dict[str, Any]) -> list[list[str]]:
    """Cells, the header first: engine, per category the median (and spread where several prompts
    are in it), prefill, share of same tokens; then the ratios to the best mode of llama.cpp."""
    names, made = categories(report), rows(report)
    cells = [["decode, tokens/s", *names, "prefill, tokens/s", "same tokens"]]
    for row in made:
        line = [row.engine.replace("/", " ")]
        for name in names:
            figure = row.by.get(name)
            if figure is None:
                line.append("–")
            elif figure.low == figure.high:
                line.append(_speed(figure.speed))
            else:
                line.append(f"{_speed(figure.speed)} ({_speed(figure.low)}–{_speed(figure.high)})")
        line += ["–" if row.prefill is None else _speed(row.prefill), f"{row.same * 100:.0f} %"]
        cells.append(line)
    for ours in ("off", "auto"):
        for theirs, said in (("llama.cpp/plain", "llama.cpp plain"), ("llama.cpp/", "its best")):
            if ours == "off" and theirs == "llama.cpp/":
                continue
            found = ratios(made, OURS + ours, theirs)
            if found:
                line = [f"{ours} / {said}"]
                line += [f"{found[n][0]:.2f} ×" if n in found else "–" for n in names]
                cells.append([*line, "", ""])
    return cells


def markdown(reports: Sequence[dict[str, Any]]) -> str:
    """A table per report, with what it was made on above it."""
    if not reports:
        return NONE_YET
    parts = []
    for report in reports:
        header, *body = table(report)
        lines = [f"{described(report)}:", "", _line(header)]
        lines.append("|".join(["", *["---"] * len(header), ""]))
        parts.append("\n".join([*lines, *map(_line, body)]))
    return "\n\n".join(parts)


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def update(readme: Path, text: str) -> None:
    """Put `text` between the markers of a file. ValueError if they are not there."""
    whole = readme.read_text(encoding="utf-8")
    before, begin, rest = whole.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"update-readme: {readme} has no lines {BEGIN} and {END}")
    readme.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def plot(report: dict[str, Any]) -> str:
    """An SVG file: a group of bars per category, the prompts' spread as a line on each bar."""
    made = rows(report)
    names = categories(report)
    longest = max((f.high for row in made for f in row.by.values()), default=1.0)
    across = (WIDTH - NAME - 60) / longest
    body: list[str] = []
    y = 48
    for name in names:
        body.append(f'<text x="12" y="{y + 12}" font-weight="bold">{escape(name)}</text>')
        y += 20
        for row in made:
            figure = row.by.get(name)
            if figure is None:
                continue
            label = escape(row.engine.replace("/", " "))
            wide, middle = figure.speed * across, y + BAR / 2
            kind = "own" if row.engine.startswith(OURS) else "other"
            body += [
                f'<text x="{NAME - 8}" y="{y + 12}" text-anchor="end">{label}</text>',
                f'<rect class="{kind}" x="{NAME}" y="{y}" width="{wide:.1f}" height="{BAR - 3}"/>',
                f'<line class="spread" x1="{NAME + figure.low * across:.1f}" y1="{middle - 1}" '
                f'x2="{NAME + figure.high * across:.1f}" y2="{middle - 1}"/>',
                f'<text x="{NAME + figure.high * across + 6:.1f}" y="{y + 12}">'
                f"{_speed(figure.speed)}</text>",
            ]
            y += BAR
        y += 12
    title = escape(f"{report['target']}: decode, tokens per second")
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y + 48}" role="img" '
            f'aria-label="{title}">',
            f"<style>{STYLE}</style>",
            f'<text x="12" y="22" font-weight="bold">{title}</text>',
            *body,
            *(
                f'<text x="12" y="{y + 12 * (i + 1)}" style="font-size:9px">{escape(line)}</text>'
                for i, line in enumerate(wrap(described(report), 120))
            ),
            "</svg>\n",
        ]
    )
