"""One generation being served: the engine's events become messages, whoever carries them.

Text is made here, once per choice, and speculation summed up. `Outbox` holds what a connection has
not sent yet: numbered when sent, merged when its reader is slow. Knows no sockets and no encodings.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any, Protocol, get_args

from spec_serve.api import messages as m
from spec_serve.api.convert import Prepared, wire_field
from spec_serve.api.text import TextStream
from spec_serve.spec.request import (
    Constrained,
    Delta,
    Event,
    Finished,
    PromptScored,
    RequestError,
    SegmentFinished,
    Started,
    StepRecord,
    TokenLogprob,
    Usage,
)

MERGE_FROM = 16  # messages waiting, from which on deltas of a choice are merged
MAX_BYTES = 1 << 20  # waiting for one reader, roughly
MAX_STUCK_S = 30.0
FLOOR = -9999.0  # log-probability of the impossible, which JSON could not hold
CODES: dict[str, m.Code] = {code: code for code in get_args(m.Code)}
RETRY_MS = {"overloaded": 1000, "draining": 5000, "rate_limited": 1000}

_NOTHING: list[Any] = []  # stands in many messages: never changed
_Step, _Delta = m.Step, m.Delta

Numbered = m.Started | m.Delta | m.PromptLogprobs | m.Finished | m.Error


class Pushes(Protocol):
    """Takes numbered messages at once. An object, whose method costs less than a bound one kept."""

    def push(self, message: Numbered, /) -> None: ...


class Outbox:
    """Messages of one connection that wait to be sent. wake: called when there is something.

    now: who takes a numbered message at once, None where it has to wait for `take`.
    """

    __slots__ = ("_bytes", "_direct", "_numbers", "_open", "_since", "_waiting", "now", "wake")

    def __init__(self, wake: Callable[[], None]) -> None:
        self.wake = wake
        self.now: Pushes | None = None
        self._numbers: dict[str, count[int]] = {}
        self._direct: Pushes | None = None
        self._waiting: list[Numbered] = []
        self._open: dict[tuple[str, int], m.Delta] = {}
        self._bytes = 0
        self._since = 0.0

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def overflowing(self) -> bool:
        """The reader is too slow to be waited for."""
        if not self._waiting:
            return False
        return self._bytes > MAX_BYTES or monotonic() - self._since > MAX_STUCK_S

    def direct(self, direct: Pushes | None) -> None:
        """Hand messages to this from now on, while none waits; None: all wait for `take`."""
        self._direct = direct
        self.now = None if self._waiting else direct

    def put(self, message: Numbered, merge: bool = False) -> None:
        """Append; a delta joins an unsent one of its choice if many wait, or if told to."""
        if (now := self.now) is not None:
            self._number(message)
            now.push(message)
            return
        self._bytes += weigh(message)
        if type(message) is m.Delta:
            key = (message.gen, message.index)
            earlier = self._open.get(key)
            if earlier is not None and (merge or len(self._waiting) >= MERGE_FROM):
                earlier.text += message.text
                earlier.ids = earlier.ids + message.ids
                earlier.logprobs = earlier.logprobs + message.logprobs
                earlier.steps = earlier.steps + message.steps
                if self._bytes > MAX_BYTES:
                    self.wake()  # who waits for its reader has to learn that it is too slow
                return
            self._open[key] = message
        elif type(message) is m.Finished:
            self._open.pop((message.gen, message.index), None)
        elif type(message) is m.Error:
            for key in [key for key in self._open if key[0] == message.gen]:
                del self._open[key]
        if not self._waiting:
            self._since = monotonic()
            self.now = None
        self._waiting.append(message)
        self.wake()

    def go_on(self, gen: str, seq: int) -> None:
        """The next message of gen has this number: a generation moved here in its middle."""
        self._numbers[gen] = count(seq)

    def numbers(self, gen: str) -> count[int]:
        """What counts the messages of gen. Who asks while none waits may number them itself."""
        found = self._numbers.get(gen)
        if found is None:
            found = self._numbers[gen] = count()
        return found

    def leave(self, gen: str) -> None:
        """Number gen's messages no longer: it has moved away, and nothing of it waits."""
        self._numbers.pop(gen, None)

    def take(self) -> list[Numbered]:
        """All that wait, numbered per generation without gaps."""
        taken, self._waiting = self._waiting, []
        self.now = self._direct
        self._open.clear()
        self._bytes = 0
        for message in taken:
            self._number(message)
        return taken

    def _number(self, message: Numbered) -> None:
        gen = message.gen
        if gen is None:
            return
        message.seq = next(self.numbers(gen))
        if type(message) is m.Error or (type(message) is m.Finished and message.last):
            del self._numbers[gen]


def weigh(message: Numbered) -> int:
    """About how many bytes a message takes up."""
    if type(message) is m.Delta:
        steps = sum(48 + 12 * len(step.drafted_ids) for step in message.steps)
        top = sum(40 + 24 * len(entry.top) for entry in message.logprobs)
        return 64 + 2 * len(message.text) + 6 * len(message.ids) + steps + top
    if type(message) is m.PromptLogprobs:
        return 64 + sum(40 + 24 * len(entry.top) for entry in message.logprobs)
    return 256


def failure(error: RequestError, gen: str | None = None, wire: m.Generate | None = None) -> m.Error:
    """The message for a request that can't be served, or failed."""
    field, code = error.field, CODES.get(error.code, "engine_error")
    said = str(error)
    if wire is not None and field and (named := wire_field(wire, field)) != field:
        said = named + said.removeprefix(field)
        field = named
    retry = error.retry_after_ms or RETRY_MS.get(code, 0)
    return m.Error(
        code, said, gen=gen, param=field or None, retryable=retry > 0, retry_after_ms=retry
    )


class Generation:
    """A request on its way. `take` is its sink. cancel: ends the request in the engine.

    `over` once its last message is in the outbox; `on_over` is called then. note: told each event
    first, but of deltas only the first.
    """

    __slots__ = (
        "_cancel", "_choices", "_detail", "_first", "_gen", "_ids", "_left", "_model", "_numbers",
        "_on_over", "_outbox", "_place", "_plain", "_prepared", "_rare", "_started", "_token_text",
        "gen", "id", "note", "over",
    )  # fmt: skip

    def __init__(
        self,
        gen: str,
        model: str,
        prepared: Prepared,
        outbox: Outbox,
        cancel: Callable[[str], None],
        on_over: Callable[[str], None],
    ) -> None:
        request = prepared.request
        self.gen, self.id = gen, request.id
        self._gen = gen  # beside the others that a delta needs: slots lie in the order of names
        self.over = False
        self.note: Callable[[Event], None] = _unnoted
        self._rare = True  # no tokens yet, or over
        self._model, self._prepared, self._outbox = model, prepared, outbox
        self._cancel, self._on_over = cancel, on_over
        self._choices = [prepared.stream(Choice) for _ in range(request.n)]
        self._choices += [one.stream(Choice) for one in prepared.segments]
        self._place = 0  # of the segment that comes now
        self._first = self._choices[0]
        self._numbers: count[int] | None = None  # the outbox's, once asked for
        self._left = request.n
        self._started = False
        wire = prepared.wire
        self._ids, self._detail = wire.ids, wire.steps
        self._plain = wire.steps == "steps"  # the usual case: no trees, no names
        self._token_text = prepared.tokenizer.token_text

    def take(self, event: Event) -> None:
        """Turn one event into messages; called in the loop's thread."""
        if type(event) is not Delta:
            self.note(event)
            self.tell(event)
            return
        # For every delta of every stream: few calls, and few objects that the processor's cache
        # may have lost since the last step.
        if self._rare:
            if self.over:
                return
            self._rare = False
            self.note(event)
        index, step = event.index or self._place, event.step
        choice = self._choices[index] if index else self._first
        text = choice.push(event.tokens)
        choice.drafted += step.drafted
        try:
            choice.histogram[step.accepted] += 1
        except IndexError:
            choice.widen(step.accepted)
        ids = event.tokens if self._ids else _NOTHING
        logprobs = self._logprobs(event.logprobs) if event.logprobs else _NOTHING
        if self._plain:
            made = _Step(
                step.step, step.drafted, step.accepted, step.sources,
                step.draft_us, step.verify_us, step.host_us,
                _NOTHING, _NOTHING, _NOTHING, _NOTHING,
            )  # fmt: skip
            steps = [made]
        else:
            steps = [self._step(step)] if self._detail == "tokens" else _NOTHING
            if not (text or ids or logprobs or steps):
                return
        outbox = self._outbox
        if (now := outbox.now) is None:
            outbox.put(_Delta(self.gen, 0, index, text, ids, logprobs, steps))
        else:  # as `put` would
            if (numbers := self._numbers) is None:
                numbers = self._numbers = outbox.numbers(self.gen)
            now.push(_Delta(self._gen, next(numbers), index, text, ids, logprobs, steps))

    def tell(self, event: Event) -> None:
        """The same for an event other than a delta, without noting it."""
        if self.over:
            return
        kind = type(event)
        if kind is Finished:
            self._finished(event)  # type: ignore[arg-type]
        elif kind is SegmentFinished:
            self._segment(event)  # type: ignore[arg-type]
        elif kind is Started:
            if not self._started:
                self._start(event)  # type: ignore[arg-type]
        elif isinstance(event, PromptScored) and event.index == 0:
            self._outbox.put(m.PromptLogprobs(self.gen, 0, self._logprobs(event.logprobs)))

    def move(self, outbox: Outbox, on_over: Callable[[str], None]) -> None:
        """From now on messages go elsewhere; the outboxes number them."""
        self._outbox, self._on_over, self._numbers = outbox, on_over, None

    def _start(self, event: Started) -> None:
        self._started = True
        request = event.request
        self._outbox.put(
            m.Started(
                self.gen, 0, request.id, self._model, len(request.prompt),
                event.cached_tokens, event.queue_ms,
            )
        )  # fmt: skip

    def _step(self, step: StepRecord) -> m.Step:
        made = m.Step(
            step.step, step.drafted, step.accepted, step.sources,
            step.draft_us, step.verify_us, step.host_us,
        )  # fmt: skip
        made.drafted_ids, made.drafted_parents = step.tree_tokens, step.tree_parents
        made.drafted_text = [self._token_text(token) for token in step.tree_tokens]
        made.drafted_sources = step.tree_sources
        return made

    def _finished(self, event: Finished) -> None:
        index = event.index or self._place
        if event.error is not None or event.reason == "error":
            error = event.error or RequestError("", "the engine failed", "engine_error")
            self._end()
            self._outbox.put(failure(error, self.gen, self._prepared.wire))
            if self._left > 1:
                self._cancel(self.id)
            return
        self._left -= 1
        if not self._left:
            self._end()
        self._put_end(event, index, event.own or event.usage)

    def _segment(self, event: SegmentFinished) -> None:
        place = self._place
        self._place += 1
        self._put_end(event, place, event.usage)

    def _put_end(self, event: Finished | SegmentFinished, index: int, usage: Usage) -> None:
        if rest := self._choices[index].finish():
            self._outbox.put(m.Delta(self.gen, 0, index, rest), merge=True)
        timings = event.timings
        assert event.reason != "error"
        self._outbox.put(
            m.Finished(
                gen=self.gen,
                seq=0,
                index=index,
                reason=event.reason,
                matched=event.matched,
                usage=m.Usage(
                    usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens,
                    usage.accepted_prediction_tokens, usage.rejected_prediction_tokens,
                ),
                timings=m.Timings(
                    timings.queue_ms, timings.prefill_ms, timings.ttft_ms, timings.decode_ms
                ),
                speculation=self._choices[index].summary() if self._detail != "none" else None,
                constraint=constrained(event.constraint),
                last=not self._left,
            )
        )  # fmt: skip

    def _end(self) -> None:
        self.over = self._rare = True
        self._on_over(self.gen)

    def _logprobs(self, scored: list[TokenLogprob]) -> list[m.Logprob]:
        text = self._token_text
        return [
            m.Logprob(
                entry.token, _finite(entry.logprob), text(entry.token),
                [(token, _finite(lp), text(token)) for token, lp in entry.top],
            )
            for entry in scored
        ]  # fmt: skip


def _finite(logprob: float) -> float:
    return logprob if math.isfinite(logprob) else FLOOR


def constrained(told: Constrained | None) -> m.Constrained | None:
    """What became of a constraint, as it is told."""
    if told is None:
        return None
    return m.Constrained(told.complete, list(told.ignored), told.schema_valid, told.forced)


class Choice(TextStream):
    """The text of a choice, and its speculation summed up over the steps.

    One object, as both are needed at each step. histogram[j]: steps that accepted j.
    """

    __slots__ = ("drafted", "histogram")

    def __init__(self, *told: Any, **more: Any) -> None:
        super().__init__(*told, **more)
        self.drafted = 0
        self.histogram: list[int] = []

    def widen(self, accepted: int) -> None:
        """Count a step that accepted more than any before."""
        self.histogram += [0] * (accepted - len(self.histogram))
        self.histogram.append(1)

    def summary(self) -> m.Summary:
        """mean_accepted_length: tokens per step, the target's own included."""
        steps = sum(self.histogram)
        accepted = sum(j * times for j, times in enumerate(self.histogram))
        return m.Summary(
            steps,
            self.drafted,
            accepted,
            1.0 + accepted / steps if steps else 0.0,
            accepted / self.drafted if self.drafted else 0.0,
            self.histogram,
        )


def _unnoted(event: Event) -> None:
    """Where nobody wants to know."""
