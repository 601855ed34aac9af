"""How benches report: a plain table on the terminal and the same figures as JSON."""

from __future__ import annotations

import json
import platform
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any


def cell(value: object) -> str:
    """A value as tables show it."""
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 10 else f"{value:.1f}"
    return "" if value is None else str(value)


def table(records: Sequence[Mapping[str, object]]) -> None:
    """Print records as aligned columns; the first record names them."""
    if not records:
        return
    names = list(records[0])
    rows = [names, *([cell(record.get(name)) for name in names] for record in records)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(names))]
    for row in rows:
        line = "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        print(line, flush=True)


def write_json(path: str, report: Mapping[str, Any]) -> None:
    """Write the report with when and where it was made; an empty path writes nothing."""
    if not path:
        return
    made = {
        "made": datetime.now(UTC).isoformat(timespec="seconds"),
        "python": sys.version.split()[0],
        "machine": platform.machine(),
        **report,
    }
    Path(path).write_text(json.dumps(made, indent=1) + "\n")
