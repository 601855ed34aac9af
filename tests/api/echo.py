"""An engine that echoes its prompt, some tokens per step, and a tokenizer of single bytes.

Runs spread tokens as accepted runs would, so that characters and stop strings are torn apart in
every way. Holds the engine's promises about threads, cancelling, deadlines and draining. Imported
by tests and by the server processes they start.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from spec_serve.cache.blocks import BlockLog
from spec_serve.spec.admission import EngineInfo, Limits, check_request
from spec_serve.spec.request import (
    Delta,
    Event,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Started,
    StepRecord,
    TokenLogprob,
    Usage,
)
from spec_serve.spec.stats import EngineStats

EOS = 256
VOCAB = 257


class ByteTokens:
    """Token i is byte i; 256 is the end of the sequence and a control token."""

    vocab_size = VOCAB
    bos_id = None
    eos_ids = frozenset({EOS})
    unused_ids: frozenset[int] = frozenset()
    # Tools are taken and left out; calls are written as Hermes's family does.
    chat_template: str | None = "{{ messages }}{% if tools %}<tool_call>{% endif %}"

    def encode(self, text: str, *, special: bool = False, bos: bool | None = None) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def is_special(self, token_id: int) -> bool:
        return token_id == EOS

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def render_chat(
        self, messages: list[dict[str, Any]], *, tools: list[dict[str, Any]] | None = None
    ) -> list[int]:
        if any(message["content"] == "raise" for message in messages):
            raise ValueError("roles must alternate")
        return [token for message in messages for token in message["content"].encode()]

    def render_around(
        self, messages: list[dict[str, Any]], begun: str | None, hole: str
    ) -> list[list[int]]:
        text = "".join(message["content"] for message in messages) + (begun or "")
        return self.encode_around(text.split(hole))

    def encode_around(self, parts: Sequence[str]) -> list[list[int]]:
        return [list(part.encode()) for part in parts]


class _Choice:
    def __init__(self, request: Request, index: int) -> None:
        self.request, self.index = request, index
        self.arrived = time.monotonic()
        self.started = False
        self.sent = self.steps = 0
        self.watch = request.stopping.watch() if request.stopping.watch else None


class Echo:
    """Echoes; behind the prompt comes EOS, or the prompt again with ignore_eos.

    run: tokens per step. pause: seconds a step takes. rows: choices at once. fail_at: the step that
    raises, as an engine that dies.
    """

    def __init__(
        self, run: int = 3, pause: float = 0.0, rows: int = 4, fail_at: int = 0, context: int = 4096
    ) -> None:
        self.info = EngineInfo(
            "echo", "none", VOCAB, context, context, rows, "float32", "cpu", 8, ("lookup",)
        )
        self.limits = Limits()
        self._run, self.pause, self._rows, self._fail_at = run, pause, rows, fail_at
        self._wake = threading.Condition()
        self._choices: list[_Choice] = []
        self._cancels: set[str] = set()
        self._stopped = self._draining = False
        self._stats = EngineStats(kv_total=context)
        self.blocks: BlockLog | None = None

    def validate(self, request: Request) -> None:
        check_request(request, self.info, self.limits)
        if request.constraint is not None:
            raise RequestError("constraint", "an echo enforces none")

    def submit(self, request: Request) -> None:
        self.validate(request)
        with self._wake:
            if self._draining:
                raise RequestError("", "the server is shutting down", "draining")
            if any(c.request.id == request.id for c in self._choices):
                raise RequestError("id", "is already running")
            self._choices += [_Choice(request, i) for i in range(request.n)]
            self._stats.requests += 1
            self._wake.notify()

    def cancel(self, request_id: str) -> None:
        with self._wake:
            self._cancels.add(request_id)
            self._wake.notify()

    def drain(self) -> None:
        self._draining = True

    def stop(self) -> None:
        with self._wake:
            self._stopped = True
            self._wake.notify()

    def idle(self) -> bool:
        return not self._choices

    def stats(self) -> EngineStats:
        stats = self._stats.copy()
        stats.running = min(len(self._choices), self._rows)
        stats.waiting = len(self._choices) - stats.running
        return stats

    def flush(self) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(0)
        return done

    def run(self, publish: Callable[[list[Event]], None]) -> None:
        while True:
            with self._wake:
                while not (self._choices or self._stopped):
                    self._cancels.clear()
                    self._wake.wait()
                if self._stopped:
                    self._cancels |= {c.request.id for c in self._choices}
                cancels, self._cancels = self._cancels, set()
                choices = list(self._choices)
            events: list[Event] = []
            for choice in choices:
                if choice.request.id in cancels:
                    self._stats.aborted += 1
                    self._finish(choice, "cancelled", None, events)
                elif (choice.request.deadline or math.inf) <= time.monotonic():
                    late = RequestError("deadline", "the deadline has passed", "timeout")
                    self._finish(choice, "error", None, events, late)
            for choice in self._choices[: self._rows]:
                self._step(choice, events)
            self._stats.steps += 1
            if self._stats.steps == self._fail_at:
                raise RuntimeError("told to fail")
            publish(events)
            if self._stopped:
                return
            time.sleep(self.pause)

    def _step(self, choice: _Choice, events: list[Event]) -> None:
        request, index = choice.request, choice.index
        if not choice.started:
            choice.started = True
            events.append(Started(request, index, 0, 0.0))
        text = request.prompt
        limit = request.stopping.max_tokens or self.info.max_context - len(text)
        tokens: list[int] = []
        reason: Any = None
        matched: int | str | None = None
        for at in range(choice.sent, choice.sent + self._run):
            ended = at >= len(text) and not request.stopping.ignore_eos
            tokens.append(EOS if ended else text[at % len(text)])
            if ended:
                reason, matched = "stop", EOS
            elif at + 1 == limit:
                reason = "length"
            if reason:
                break
        if choice.watch is not None:
            found = choice.watch.feed(tokens, max(0, request.stopping.min_tokens - choice.sent - 1))
            if found is not None:
                reason, matched = "stop", found[1]
                del tokens[found[0] :]
        choice.sent += len(tokens)
        choice.steps += 1
        self._stats.tokens_out += len(tokens)
        accepted = len(tokens) - 1
        step = StepRecord(
            choice.steps, accepted + 1, accepted, {"lookup": (accepted + 1, accepted)},
            1, 2, 3, 1, [0] * (accepted + 1), list(range(-1, accepted)),
        )  # fmt: skip
        scores = None
        if request.logprobs is not None:
            top = [(t, -math.inf) for t in range(request.logprobs)]
            scores = [TokenLogprob(token, -0.5, top) for token in tokens]
        events.append(Delta(request, index, tokens, scores, step))
        if reason:
            self._finish(choice, reason, matched, events)

    def _finish(
        self, choice: _Choice, reason: Any, matched: int | str | None, events: list[Event],
        error: RequestError | None = None,
    ) -> None:  # fmt: skip
        usage = Usage(len(choice.request.prompt), 0, choice.sent)
        timings = RequestTimings(0.0, 1.0, 1.0, 2.0)
        with self._wake:
            self._choices.remove(choice)
        self._stats.finished += 1
        events.append(
            Finished(choice.request, choice.index, reason, matched, usage, timings, error)
        )
