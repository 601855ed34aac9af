"""Bars as inline SVG: a value per name and series, the names below each other.

Beside bench/plots.py for what has no order on an axis: categories, sources. Colours come from the
page's CSS variables. Knows numbers and labels only.
"""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from spec_serve.bench.plots import COLOURS, WIDTH

LEFT, RIGHT, TOP = 150, 52, 46
BAR, GAP = 9, 8  # pixels of a bar, and between two names


def bars(title: str, series: Mapping[str, Mapping[str, float]], unit: str = "") -> str:
    """One plot. series: name of the colour -> name of the bar -> value from 0 on.

    Bars stand in the order in which their names are first met; one that a series lacks is left out.
    """
    names = list(dict.fromkeys(name for held in series.values() for name in held))
    most = max((value for held in series.values() for value in held.values()), default=0.0) or 1.0
    step = len(series) * BAR + GAP
    high = TOP + len(names) * step + 6
    said = [
        f'<svg viewBox="0 0 {WIDTH} {high}" role="img" aria-label="{escape(title)}">',
        f'<text class="title" x="10" y="16">{escape(title)}</text>',
    ]
    for i, name in enumerate(series):
        said.append(
            f'<text class="tick" x="{10 + i * WIDTH / max(len(series), 1):.0f}" y="34"'
            f' style="fill:var(--c{i % COLOURS})">{escape(name)}</text>'
        )
    for row, name in enumerate(names):
        top = TOP + row * step
        middle = top + len(series) * BAR / 2
        said.append(
            f'<text class="tick" x="{LEFT - 8}" y="{middle:.1f}" dy="4" text-anchor="end">'
            f"{escape(name)}</text>"
        )
        for i, held in enumerate(series.values()):
            if name not in held:
                continue
            length = held[name] / most * (WIDTH - LEFT - RIGHT)
            said.append(
                f'<rect x="{LEFT}" y="{top + i * BAR}" width="{length:.1f}" height="{BAR - 1}"'
                f' style="fill:var(--c{i % COLOURS})"/>'
                f'<text class="tick" x="{LEFT + length + 4:.1f}" y="{top + i * BAR + BAR - 1}">'
                f"{held[name]:.2f}{escape(unit)}</text>"
            )
    return "\n".join([*said, "</svg>"])
