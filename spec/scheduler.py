"""Who runs in the next step, and who waits.

Decoding rows go first; prompt chunks fill what is left of the step's token budget, short prompts
before long ones, and smaller chunks while others decode, so that running rows keep their cadence.
Waiting longer makes a prompt count as shorter, so nobody starves. Knows rows and counts, no slots.
"""

from __future__ import annotations

from collections.abc import Iterator

from spec_serve.spec.row import Row

AGE = 64.0  # tokens a waiting prompt's length shrinks per second of waiting


class Scheduler:
    """Waiting and running rows. step_tokens: nodes per step at most; busy_chunk: prompt tokens per
    step while other rows decode."""

    def __init__(self, max_rows: int, step_tokens: int, busy_chunk: int) -> None:
        self.max_rows = max_rows
        self.step_tokens = step_tokens
        self.busy_chunk = busy_chunk
        self.waiting: list[Row] = []
        self.running: list[Row] = []

    def rows(self) -> Iterator[Row]:
        yield from self.running
        yield from self.waiting

    def next_waiting(self, now: float) -> Row | None:
        """The row to admit next: highest priority, then shortest prompt, aged by its waiting."""
        if len(self.running) >= self.max_rows or not self.waiting:
            return None
        ready = [row for row in self.waiting if row.leader is None or row.leader.shared]
        if not ready:
            return None
        return min(ready, key=lambda row: _rank(row, len(row.tokens), now))

    def admit(self, row: Row) -> None:
        self.waiting.remove(row)
        self.running.append(row)

    def retire(self, row: Row) -> None:
        (self.running if row in self.running else self.waiting).remove(row)

    def put_back(self, row: Row) -> None:
        """A preempted row waits again, ahead of its equals."""
        self.running.remove(row)
        self.waiting.insert(0, row)

    def youngest(self) -> Row:
        """The running row to preempt: of the lowest priority, the one that came last.

        The one that came first keeps its place for good, so preemption always ends.
        """
        return min(self.running, key=lambda row: (row.request.priority, -row.order))

    def pick(self, now: float) -> list[tuple[Row, int]]:
        """(row, given nodes) of the next step: rows with one pending token, then prompt chunks."""
        decoding, prompts = [], []
        for row in self.running:
            pending = len(row.tokens) - row.prefix
            if pending == 1:
                decoding.append((row, 1))
            else:
                prompts.append((_rank(row, pending, now), pending, row))
        if not prompts:
            return decoding
        left = self.step_tokens - len(decoding)
        if decoding:
            left = min(left, self.busy_chunk)
        prompts.sort(key=lambda entry: entry[0])
        for _, pending, row in prompts:
            if left <= 0:
                break
            chunk = min(pending, left, 64 if not row.scored else left)
            decoding.append((row, chunk))
            left -= chunk
        return decoding


def _rank(row: Row, tokens: int, now: float) -> tuple[int, float, int]:
    """Lower goes first: highest priority, then fewest tokens to run, aged by its waiting."""
    return -row.request.priority, max(0.0, tokens - AGE * (now - row.arrived)), row.order
