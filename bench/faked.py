"""An engine that costs nothing, for measuring what serving costs: every tick, some tokens a row.

Each step is stamped when it ends (microseconds of the machine's monotonic clock, in `host_us`), so
that a reader in another process can tell how long its bytes took. Knows no model; its tokens are
the bytes of a text.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from spec_serve.spec.admission import EngineInfo, Limits, check_request
from spec_serve.spec.request import (
    Delta,
    Event,
    Finished,
    Request,
    RequestTimings,
    Started,
    StepRecord,
    Usage,
)
from spec_serve.spec.stats import EngineStats

EOS, VOCAB = 256, 257
TEXT = b"the quick brown fox jumps over the lazy dog; "
WRAP = 2**32


def stamp() -> int:
    """Now, in microseconds, as a StepRecord can carry it."""
    return int(time.monotonic() * 1e6) % WRAP


def age_us(stamped: int, now: int | None = None) -> int:
    """How long ago that was, or how long before `now`."""
    return ((stamp() if now is None else now) - stamped) % WRAP


class ByteText:
    """Token i is byte i; a tokenizer as api/convert.py wants it."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = frozenset({EOS})
    unused_ids: frozenset[int] = frozenset()
    chat_template: str | None = None

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        """The bytes."""
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        """One byte; nothing for the end."""
        return b"" if token_id == EOS else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        """The byte as a character."""
        return self.token_bytes(token_id).decode(errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether it is the end."""
        return token_id == EOS

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        """Refuses: there is no template."""
        raise ValueError("this tokenizer has no chat template")

    def render_around(
        self, messages: list[dict[str, Any]], begun: str | None, hole: str
    ) -> list[list[int]]:
        """Refuses: there is no template."""
        raise ValueError("this tokenizer has no chat template")

    def encode_around(self, parts: Sequence[str]) -> list[list[int]]:
        """The bytes of each."""
        return [list(part.encode()) for part in parts]


class Ticking:
    """Every `tick` seconds each running request gets `tokens` more, until its max_tokens."""

    def __init__(self, tick: float, tokens: int, rows: int = 1024) -> None:
        self.info = EngineInfo(
            "faked", "none", VOCAB, 1 << 20, 1 << 20, rows, "float32", "cpu", 8, ("lookup",)
        )
        self.limits = Limits()
        self._tick, self._tokens = tick, tokens
        self._lock = threading.Condition()
        self._rows: dict[str, tuple[Request, int]] = {}
        self._cancels: set[str] = set()
        self._stopped = False
        self._stats = EngineStats(kv_total=1 << 20)
        self.blocks = None

    def validate(self, request: Request) -> None:
        """Raises RequestError."""
        check_request(request, self.info, self.limits)

    def submit(self, request: Request) -> None:
        """Begin with the next tick."""
        with self._lock:
            self._rows[request.id] = (request, 0)
            self._stats.requests += 1
            self._lock.notify()

    def cancel(self, request_id: str) -> None:
        """End it with the next tick."""
        with self._lock:
            self._cancels.add(request_id)
            self._lock.notify()

    def drain(self) -> None:
        """Nothing to do."""

    def flush(self) -> Future[int]:
        """Nothing is cached."""
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def stop(self) -> None:
        """End `run`."""
        with self._lock:
            self._stopped = True
            self._lock.notify()

    def idle(self) -> bool:
        """Whether nothing runs."""
        return not self._rows

    def stats(self) -> EngineStats:
        """The counters."""
        made = self._stats.copy()
        made.running = len(self._rows)
        return made

    def run(self, publish: Callable[[list[Event]], None]) -> None:
        """Tick until stopped."""
        due = time.monotonic()
        while True:
            with self._lock:
                while not (self._rows or self._stopped):
                    self._lock.wait()
                    due = time.monotonic()
                if self._stopped:
                    return
                rows, cancels = list(self._rows.values()), self._cancels
                self._cancels = set()
            publish(self._step(rows, cancels))
            due = max(due + self._tick, time.monotonic())
            time.sleep(max(0.0, due - time.monotonic()))

    def _step(self, rows: list[tuple[Request, int]], cancels: set[str]) -> list[Event]:
        events: list[Event] = []
        n, now = self._tokens, stamp()
        for request, done in rows:
            if request.id in cancels:
                events.append(self._end(request, done, "cancelled"))
                continue
            if not done:
                events.append(Started(request, 0, 0, 0.0))
            tokens = [TEXT[at % len(TEXT)] for at in range(done, done + n)]
            step = StepRecord(
                done // n, n, n - 1, {"lookup": (n, n - 1)}, 900, 9000, now, len(rows), [], []
            )
            events.append(Delta(request, 0, tokens, None, step))
            done += n
            self._stats.tokens_out += n
            if done >= (request.stopping.max_tokens or 1 << 20):
                events.append(self._end(request, done, "length"))
            else:
                self._rows[request.id] = (request, done)
        self._stats.steps += 1
        return events

    def _end(self, request: Request, done: int, reason: Any) -> Finished:
        with self._lock:
            self._rows.pop(request.id, None)
        usage, timings = Usage(len(request.prompt), 0, done), RequestTimings(0, 0, 0, 0)
        return Finished(request, 0, reason, None, usage, timings)
