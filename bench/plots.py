"""Plots as inline SVG, without a library: lines, steps or dots over linear or logarithmic axes.

Colours come from the page's CSS variables (--c0, --c1, ... and --ink), so that a plot is readable
on light and dark. Knows numbers and labels only.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import Literal

Point = tuple[float, float]
WIDTH, HEIGHT = 560, 280
LEFT, RIGHT, TOP, BOTTOM = 62, 14, 30, 44
COLOURS = 6


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round values from low to high, about `count` of them."""
    span = high - low
    if span <= 0:
        return [low]
    rough = span / count
    unit = 10 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    first = math.ceil(low / step - 1e-9)
    return [i * step for i in range(first, math.floor(high / step + 1e-9) + 1)]


def _log_ticks(low: float, high: float) -> list[float]:
    factors = (1, 2, 5) if high - low < 2.5 else (1,)
    whole = range(math.floor(low), math.ceil(high) + 1)
    made = [10.0**i * factor for i in whole for factor in factors]
    found = [value for value in made if low <= math.log10(value) <= high]
    return found if len(found) > 1 else [10**low, 10**high]


def _number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:.0f}"


class _Axis:
    def __init__(self, values: Sequence[float], log: bool, length: float, zero: bool) -> None:
        self.log = log
        shown = [math.log10(max(value, 1e-3)) for value in values] if log else list(values)
        low, high = min(shown, default=0.0), max(shown, default=1.0)
        if zero and not log:
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low < 1e-9:
            low, high = (low - 0.5, high + 0.5) if log else (min(low, 0.0), high + (high == low))
        self._low, self._high, self._length = low, high, length

    def place(self, value: float) -> float:
        shown = math.log10(max(value, 1e-3)) if self.log else value
        return (shown - self._low) / (self._high - self._low) * self._length

    def ticks(self) -> list[float]:
        if self.log:
            return _log_ticks(self._low, self._high)
        return ticks(self._low, self._high)


def chart(
    title: str,
    series: Mapping[str, Sequence[Point]],
    x: str,
    y: str,
    *,
    kind: Literal["line", "step", "dots"] = "line",
    log_x: bool = False,
    mark: float | None = None,
) -> str:
    """One plot. series: name -> points, drawn in order. mark: a vertical line at this x."""
    points = [point for held in series.values() for point in held]
    wide, high = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    xs = [px for px, _ in points] + ([mark] if mark is not None else [])
    across = _Axis(xs, log_x, wide, not log_x)
    up = _Axis([py for _, py in points], False, high, True)

    def at(px: float, py: float) -> tuple[str, str]:
        return f"{LEFT + across.place(px):.1f}", f"{TOP + high - up.place(py):.1f}"

    said = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="{LEFT}" y="16">{escape(title)}</text>',
    ]
    for value in up.ticks():
        _, py = at(xs[0] if xs else 0.0, value)
        said.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{py}" y2="{py}"/>')
        said.append(f'<text class="tick" x="{LEFT - 6}" y="{py}" dy="4" text-anchor="end">'
                    f"{_number(value)}</text>")  # fmt: skip
    for value in across.ticks():
        px, _ = at(value, 0.0)
        said.append(f'<text class="tick" x="{px}" y="{TOP + high + 16}" text-anchor="middle">'
                    f"{_number(value)}</text>")  # fmt: skip
    said.append(f'<text class="tick" x="{LEFT + wide / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
                f"{escape(x)}</text>")  # fmt: skip
    said.append(f'<text class="tick" x="14" y="{TOP + high / 2}" text-anchor="middle" '
                f'transform="rotate(-90 14 {TOP + high / 2})">{escape(y)}</text>')  # fmt: skip
    if mark is not None:
        px, _ = at(mark, 0.0)
        said.append(f'<line class="mark" x1="{px}" x2="{px}" y1="{TOP}" y2="{TOP + high}"/>')
    for i, (name, held) in enumerate(series.items()):
        colour = f"var(--c{i % COLOURS})"
        said.append(_drawn([at(*point) for point in held], kind, colour))
        if len(series) > 1:
            edge = WIDTH - RIGHT - 90 * (len(series) - 1 - i)
            said.append(f'<text class="tick" x="{edge}" y="16" text-anchor="end" '
                        f'style="fill:{colour}">{escape(name)}</text>')  # fmt: skip
    return "\n".join([*said, "</svg>"])


def _drawn(places: Sequence[tuple[str, str]], kind: str, colour: str) -> str:
    if kind == "dots" or len(places) == 1:
        dots = "".join(f'<circle cx="{px}" cy="{py}" r="2.2"/>' for px, py in places)
        return f'<g style="fill:{colour};opacity:0.7">{dots}</g>'
    path = ""
    for i, (px, py) in enumerate(places):
        path += f"M{px} {py}" if not i else (f"H{px}V{py}" if kind == "step" else f"L{px} {py}")
    dots = ""
    if kind == "line" and len(places) <= 20:
        dots = "".join(f'<circle cx="{px}" cy="{py}" r="3"/>' for px, py in places)
    return (
        f'<path d="{path}" style="fill:none;stroke:{colour};stroke-width:1.6"/>'
        f'<g style="fill:{colour}">{dots}</g>'
    )


def shares(values: Sequence[float], most: int = 300) -> list[Point]:
    """The distribution as points (value, percent of the values not above it), thinned out."""
    ordered = sorted(values)
    count = len(ordered)
    step = max(1, count // most)
    places = [*range(0, count, step), count - 1] if count else []
    return [(ordered[i], 100.0 * (i + 1) / count) for i in places]
