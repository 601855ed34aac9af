"""Tiles of Triton programs: candidates, the quickest of them, and a file that remembers it.

A choice is made once per device and shape by trying the candidates, and is kept as JSON beside
Triton's compiled programs. How a candidate is run and timed is the caller's; what can't be compiled
or doesn't fit the device is passed over. Knows neither attention nor where files belong.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

# Part of every key: raise it when programs change so that old choices mean nothing.
EDITION = 1


@dataclass(frozen=True, slots=True)
class Tile:
    """lines: queries times heads of a group; keys: per step of the loop; warps and stages are
    Triton's."""

    lines: int
    keys: int
    warps: int
    stages: int


class Tuner:
    """The quickest tile for each key, measured once.

    path: the file, None = forget at exit. A file that can't be read counts as empty, one that can't
    be written is left: tuning then happens again next time.
    """

    def __init__(self, path: Path | None) -> None:
        self._path = path
        self._known = {} if path is None else _read(path)

    def best(self, key: str, candidates: Sequence[Tile], seconds: Callable[[Tile], float]) -> Tile:
        """The candidate with the least `seconds`; RuntimeError if none of them runs."""
        key = f"{EDITION}|{key}"
        known = self._known.get(key)
        if known is not None and known in candidates:
            return known
        times: list[tuple[float, int]] = []
        reason = "no candidates"
        for i, tile in enumerate(candidates):
            try:
                times.append((seconds(tile), i))
            except Exception as error:  # compilers and drivers raise what they like
                reason = f"{type(error).__name__}: {error}"
        if not times:
            raise RuntimeError(f"attention: no tile runs for {key} ({reason})")
        tile = candidates[min(times)[1]]
        self._known[key] = tile
        if self._path is not None:
            _write(self._path, self._known)
        return tile


def _read(path: Path) -> dict[str, Tile]:
    try:
        held = json.loads(path.read_text())
        return {str(key): Tile(*map(int, values)) for key, values in held.items()}
    except (OSError, ValueError, TypeError, AttributeError):
        return {}


def _write(path: Path, known: dict[str, Tile]) -> None:
    """Replace the file as a whole, with what others wrote meanwhile."""
    merged = _read(path) | known
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_suffix(f".{id(known):x}.new")
        fresh.write_text(json.dumps({key: astuple(tile) for key, tile in merged.items()}))
        fresh.replace(path)
    except OSError:
        return
