"""The folder of a server that adapts: which head it serves, and what its draft is called then.

`current` in the folder is a link to the head that was last found better; without one the head that
was asked for is served. Knows names alone, no heads.
"""

from __future__ import annotations

from pathlib import Path

CURRENT = "current"


def current(folder: Path) -> Path | None:
    """The head the folder's link points to, None while there is none."""
    link = folder / CURRENT
    return link.resolve() if (link / "config.json").is_file() else None


def adapted(draft: str, folder: str) -> str:
    """The text of `--draft` with its head replaced by the folder's, if it has one."""
    head = current(Path(folder)) if folder else None
    if head is None or "+" in str(head):
        return draft
    parts = [part.strip() for part in draft.split("+")]
    places = [i for i, part in enumerate(parts) if part not in ("none", "lookup", "nextn", "")]
    if len(places) != 1:
        return draft
    parts[places[0]] = str(head)
    return "+".join(parts)
