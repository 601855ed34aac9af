"""A run's course as an SVG picture: losses per unrolled step above, held-out acceptance below.

Drawn by hand from the lines of the log, so that no plotting library is needed. Knows the log's keys
and nothing of training.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

WIDTH, HEIGHT, MARGIN = 720, 260, 48
COLOURS = ("#1f77b4", "#d95f02", "#1b9e77", "#7570b3", "#e7298a", "#66a61e", "#a6761d")


def plot(log: Sequence[Mapping[str, Any]]) -> str:
    """SVG of a log: each entry has pairs, depths [D] and per_step, those behind the first also
    loss [S]. "" with fewer than two."""
    if len(log) < 2:
        return ""
    pairs = [float(entry["pairs"]) for entry in log]
    steps = len(log[1]["loss"])
    losses = [
        (f"loss, step {i + 1}", [float(entry["loss"][i]) for entry in log[1:]])
        for i in range(steps)
    ]
    depths = len(log[0]["depths"])
    accepted = [
        (f"accepted to depth {i + 1}", [float(entry["depths"][i]) for entry in log])
        for i in range(depths)
    ]
    parts = [_panel(0, "cross-entropy", pairs[1:], losses, None)]
    parts.append(_panel(HEIGHT, "share of held-out places", pairs, accepted, 1.0))
    best = max(float(entry["per_step"]) for entry in log)
    parts.append(
        f'<text x="{MARGIN}" y="{2 * HEIGHT + 20}">pairs trained: {pairs[-1]:,.0f}; best tokens'
        f" per step with a chain: {best:.3f}</text>"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {2 * HEIGHT + 32}"'
        ' font-family="sans-serif" font-size="12">'
        '<rect width="100%" height="100%" fill="white"/>' + "".join(parts) + "</svg>\n"
    )


def _panel(
    top: int, title: str, x: Sequence[float], lines: Sequence[tuple[str, Sequence[float]]],
    high: float | None,
) -> str:  # fmt: skip
    """One set of axes with its lines and their names."""
    highest = high if high is not None else max(max(line) for _, line in lines) * 1.05 or 1.0
    left, right = MARGIN, WIDTH - 170
    bottom, roof = top + HEIGHT - 28, top + 26
    span = max(x[-1] - x[0], 1.0)

    def at(a: float, b: float) -> str:
        return (
            f"{left + (a - x[0]) / span * (right - left):.1f},"
            f"{bottom - min(b / highest, 1.0) * (bottom - roof):.1f}"
        )

    parts = [
        f'<text x="{left}" y="{top + 16}" font-weight="bold">{title}</text>'
        f'<path d="M{left},{roof}V{bottom}H{right}" fill="none" stroke="#444"/>'
    ]
    for i in range(5):
        value = highest * i / 4
        y = bottom - (bottom - roof) * i / 4
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>')
    for i, (name, line) in enumerate(lines):
        colour = COLOURS[i % len(COLOURS)]
        points = " ".join(at(a, b) for a, b in zip(x, line, strict=True))
        parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
        parts.append(
            f'<text x="{right + 8}" y="{roof + 12 + 16 * i}" fill="{colour}">{name}</text>'
        )
    return "".join(parts)
