"""What a server keeps of its traffic for `spec-serve train --adapt`, where its operator asks so.

An observer of the link: token ids of prompts and answers, no text, no names, no keys, no features.
Requests with a cache salt ask to share nothing and are left out unless the operator says otherwise.
What can't be written ends the keeping, never a request.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

from spec_serve.draft.train.traffic import Traffic
from spec_serve.spec.request import Delta, Event, Finished, Request

log = logging.getLogger("spec_serve.adapt")

SHORTEST, LONGEST = 8, 4096  # tokens of an answer that are worth keeping


class TrafficKeeper:
    """Collects answers as their tokens come. salted: those with a cache salt too."""

    def __init__(self, folder: Path, most_bytes: int, salted: bool = False) -> None:
        """OSError naming the setting where the folder can't be written."""
        try:
            self._traffic: Traffic | None = Traffic(folder, most_bytes)
        except OSError as error:
            raise OSError(f"adapt-folder: {folder}: {error.strerror or error}") from error
        self._salted = salted
        self._live: dict[tuple[str, int], list[int]] = {}

    def observe(self, events: Sequence[Event]) -> None:
        """One step's events."""
        if self._traffic is None:
            return
        for event in events:
            if type(event) is Delta:
                if self._wanted(event.request):
                    held = self._live.setdefault((event.request.id, event.index), [])
                    if len(held) < LONGEST:
                        held += event.tokens
            elif type(event) is Finished:
                answer = self._live.pop((event.request.id, event.index), [])
                if event.error is None and len(answer) >= SHORTEST:
                    self._keep(event.request, answer)

    def _wanted(self, request: Request) -> bool:
        """Whole generations alone: what follows texts given between has another prompt."""
        if request.segments or request.continuations:
            return False
        return self._salted or not request.salt

    def _keep(self, request: Request, answer: Sequence[int]) -> None:
        assert self._traffic is not None
        try:
            self._traffic.add(request.prompt, answer, request.sampling.temperature)
        except OSError as error:
            log.error("traffic is no longer kept: %s", error)
            self._traffic = None
            self._live.clear()

    def close(self) -> None:
        """The server ends."""
        if self._traffic is not None:
            self._traffic.close()
