"""Traffic of a server on disk, as token ids: a ring of files that never takes more than it may.

A server adds what its target answered, a training run reads it, oldest first; features aren't kept,
since a run computes them anew. Files can be read by their owner alone. What may be added is the
server's decision; nothing here knows requests or heads.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from spec_serve.draft.train.answers import Answer

FILES = 8
"""Of the ring; when it is full the oldest eighth goes."""

NEWEST = 0.1
"""Share of the traffic, the newest, that a new head is judged by and never sees before; as much
again, the next oldest, decides which of its checkpoints is best."""


class Traffic:
    """Adds to the ring in `folder`. most_bytes: of all its files together. One process at a time.

    OSError where the folder can't be written."""

    def __init__(self, folder: Path, most_bytes: int) -> None:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._folder, self._most = folder, most_bytes
        self._out: TextIO | None = None
        self._size = 0
        written = files(folder)
        self._file = _number(written[-1]) if written else -1
        newest = (one for path in reversed(written) for one in list(_of(path))[-1:])
        last = next(newest, None)  # of a file that has a whole line
        self._next = 0 if last is None else last.number + 1

    def add(self, prompt: Sequence[int], answer: Sequence[int], temperature: float) -> None:
        """One answer; where the ring is full the oldest ones go."""
        line = json.dumps(
            {"n": self._next, "t": temperature, "prompt": list(prompt), "answer": list(answer)},
            separators=(",", ":"),
        )
        room = self._most // FILES
        if len(line) >= room:
            return
        if self._out is None or self._size + len(line) + 1 > room:
            self._turn()
        assert self._out is not None
        self._out.write(line + "\n")
        self._out.flush()
        self._size += len(line) + 1
        self._next += 1

    def close(self) -> None:
        """Nothing more will be added."""
        if self._out is not None:
            self._out.close()
            self._out = None

    def _turn(self) -> None:
        """Begin the next file, so that with it there are FILES at most."""
        self.close()
        self._file += 1
        for old in files(self._folder)[: -(FILES - 1)]:
            old.unlink()
        path = self._folder / f"traffic-{self._file:08}.jsonl"
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        self._out = os.fdopen(handle, "w", encoding="utf-8")
        self._size = 0


def files(folder: Path) -> list[Path]:
    """The ring's files, oldest first."""
    return sorted(folder.glob("traffic-*.jsonl"))


def _number(path: Path) -> int:
    return int(path.stem.split("-")[1])


def read(folder: Path) -> Iterator[Answer]:
    """What the ring holds, oldest first; files that go meanwhile and lines cut short are left out.

    Nothing is held out yet, see `parted`."""
    for path in files(folder):
        yield from _of(path)


def _of(path: Path) -> Iterator[Answer]:
    try:
        held = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    for line in held.splitlines(keepends=True):
        if line.endswith("\n"):
            told = json.loads(line)
            yield Answer(told["n"], "traffic", told["t"], False, told["prompt"], told["answer"])


def parted(answers: Sequence[Answer]) -> tuple[list[Answer], list[Answer], list[Answer]]:
    """(trained on, chosen by, judged by): the traffic by age, each part newer than the one before.

    What is said again in a newer part with the same prompt stays: servers do see prompts again.
    ValueError if there is too little of it."""
    each = max(int(len(answers) * NEWEST), 1)
    if len(answers) < 10:
        raise ValueError(f"from: {len(answers)} answers of traffic are too few to learn from")
    first, second = len(answers) - 2 * each, len(answers) - each
    return list(answers[:first]), list(answers[first:second]), list(answers[second:])
