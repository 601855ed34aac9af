"""What passes between the server and an engine in a process of its own: msgpack, no pickle.

Requests go down under numbers, events of a step come back together under those numbers. Here too:
how a Request and an Event become messages and again what they were. Knows no sockets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from operator import attrgetter
from typing import Any, Literal

import msgspec

from spec_serve.api.text import StopStrings, StopWatch, TokenTable
from spec_serve.cache import blocks as b
from spec_serve.spec import request as r
from spec_serve.spec.admission import EngineInfo, Limits
from spec_serve.spec.stats import EngineStats


class Load(msgspec.Struct, tag=0, array_like=True):
    """First of all: what to load. options: fields of EngineOptions. threads 0 = as torch wants."""

    options: dict[str, Any]
    threads: int = 0
    log_format: str = "text"
    quiet: bool = True


class Ends(msgspec.Struct, array_like=True):
    """A Stopping; its watch as the strings it looks for, () = none."""

    max_tokens: int | None
    min_tokens: int
    eos: frozenset[int]
    token_ids: frozenset[int]
    ignore_eos: bool
    stops: tuple[str, ...]
    skip_special: bool
    shown: frozenset[int] = frozenset()


class Submit(msgspec.Struct, tag=1, array_like=True):
    """A Request. deadline is time.monotonic() seconds: one clock for all processes of a machine."""

    number: int
    id: str
    prompt: list[int]
    sampling: r.Sampling
    stopping: Ends
    speculation: r.Speculation
    n: int
    logprobs: int | None
    prompt_logprobs: int | None
    salt: str
    priority: int
    deadline: float | None
    constraint: r.Constraint | None = None
    continuations: tuple[tuple[int, ...], ...] = ()
    segments: tuple[Submit, ...] = ()
    keep: bool = False


class Cancel(msgspec.Struct, tag=2, array_like=True):
    """End a request."""

    number: int


class Drain(msgspec.Struct, tag=3, array_like=True):
    """Take no new requests."""


class Stop(msgspec.Struct, tag=4, array_like=True):
    """End after the step in progress."""


class Flush(msgspec.Struct, tag=5, array_like=True):
    """Drop what can be dropped from the prefix cache; answered by Flushed of the same number."""

    number: int


ToEngine = Load | Submit | Cancel | Drain | Stop | Flush


class Failure(msgspec.Struct, array_like=True):
    """A RequestError."""

    field: str
    message: str
    code: str
    retry_after_ms: int


class Started(msgspec.Struct, tag=0, array_like=True):
    """spec/request.py's Started of request `number`; the next three likewise."""

    number: int
    index: int
    cached_tokens: int
    queue_ms: float


class PromptScored(msgspec.Struct, tag=1, array_like=True):
    """Log-probabilities of a prompt."""

    number: int
    index: int
    logprobs: list[r.TokenLogprob]


# A StepRecord's values in order: its names with every row would be most of what is sent.
Record = tuple[
    int, int, int, dict[str, tuple[int, int]], int, int, int, int, list[int], list[int], list[str]
]
_record: Callable[[r.StepRecord], Record] = attrgetter(*(f.name for f in fields(r.StepRecord)))


class Delta(msgspec.Struct, tag=2, array_like=True):
    """Tokens of one step for one choice."""

    number: int
    index: int
    tokens: list[int]
    logprobs: list[r.TokenLogprob] | None
    step: Record


class Finished(msgspec.Struct, tag=3, array_like=True):
    """The end of a choice."""

    number: int
    index: int
    reason: r.Reason
    matched: int | str | None
    usage: r.Usage
    timings: r.RequestTimings
    error: Failure | None
    constraint: r.Constrained | None = None
    own: r.Usage | None = None


class SegmentFinished(msgspec.Struct, tag=4, array_like=True):
    """A segment is over and the next one follows."""

    number: int
    index: int
    reason: r.Reason
    matched: int | str | None
    usage: r.Usage
    timings: r.RequestTimings
    constraint: r.Constrained | None = None


Told = Started | PromptScored | Delta | SegmentFinished | Finished


class Step(msgspec.Struct, tag=10, array_like=True):
    """The events of one step. stats: the counters, now and then. seen: newest request they know."""

    events: list[Told]
    seen: int
    stats: EngineStats | None


class Flushed(msgspec.Struct, tag=11, array_like=True):
    """How many tokens a Flush has dropped."""

    number: int
    tokens: int


class Loading(msgspec.Struct, tag=12, array_like=True):
    """How far loading is: share from 0 to 1."""

    what: str
    share: float


class Ready(msgspec.Struct, tag=13, array_like=True):
    """Loaded; requests may come."""

    info: EngineInfo
    limits: Limits


class Failed(msgspec.Struct, tag=14, array_like=True):
    """Can't be loaded; message: what a user should read."""

    message: str


class Blocks(msgspec.Struct, array_like=True):
    """One change of the cache's blocks; see cache/blocks.py."""

    kind: Literal["stored", "removed", "cleared"]
    hashes: list[int] = []
    parent: int | None = None
    tokens: list[int] = []


class CacheChanged(msgspec.Struct, tag=15, array_like=True):
    """What has changed in the prefix cache, if the engine keeps a log of it."""

    changes: list[Blocks]


FromEngine = Step | Flushed | Loading | Ready | Failed | CacheChanged

encode: Callable[[ToEngine | FromEngine], bytes] = msgspec.msgpack.Encoder().encode
for_engine = msgspec.msgpack.Decoder(ToEngine).decode
for_server = msgspec.msgpack.Decoder(FromEngine).decode


def to_submit(number: int, request: r.Request) -> Submit:
    """A request for the engine's process. TypeError for a watch that is no StopWatch."""
    stopping = request.stopping
    watch = stopping.watch
    if watch is not None and not isinstance(watch, StopWatch):
        raise TypeError("only a StopWatch can be made again in another process")
    ends = Ends(
        stopping.max_tokens, stopping.min_tokens, stopping.eos, stopping.token_ids,
        stopping.ignore_eos, watch.stops.strings if watch is not None else (),
        watch.skip_special if watch is not None else True,
        watch.shown if watch is not None else frozenset(),
    )  # fmt: skip
    return Submit(
        number, request.id, request.prompt, request.sampling, ends, request.speculation, request.n,
        request.logprobs, request.prompt_logprobs, request.salt, request.priority, request.deadline,
        request.constraint, request.continuations,
        tuple(to_submit(number, one) for one in request.segments), request.keep,
    )  # fmt: skip


def from_submit(made: Submit, tokenizer: TokenTable) -> r.Request:
    """The same request in the engine's process; `tokenizer` spells what its watch looks at."""
    ends = made.stopping
    watch = None
    if ends.stops:
        watch = StopWatch(tokenizer, StopStrings(ends.stops), ends.skip_special, ends.shown)
    stopping = r.Stopping(
        ends.max_tokens, ends.min_tokens, ends.eos, ends.token_ids, ends.ignore_eos, watch
    )
    return r.Request(
        made.id, made.prompt, made.sampling, stopping, made.speculation, made.n, made.logprobs,
        made.prompt_logprobs, made.salt, made.priority, made.deadline,
        constraint=made.constraint, continuations=made.continuations,
        segments=tuple(from_submit(one, tokenizer) for one in made.segments), keep=made.keep,
    )  # fmt: skip


def to_blocks(changes: list[b.Change]) -> list[Blocks]:
    """Changes of the cache for the server."""
    made = []
    for change in changes:
        match change:
            case b.Stored(hashes, parent, tokens):
                made.append(Blocks("stored", hashes, parent, tokens))
            case b.Removed(hashes):
                made.append(Blocks("removed", hashes))
            case b.Cleared():
                made.append(Blocks("cleared"))
    return made


def from_blocks(told: list[Blocks]) -> list[b.Change]:
    """The same changes in the server."""
    made: list[b.Change] = []
    for one in told:
        if one.kind == "stored":
            made.append(b.Stored(one.hashes, one.parent, one.tokens))
        else:
            made.append(b.Removed(one.hashes) if one.kind == "removed" else b.Cleared())
    return made


def to_told(number: int, event: r.Event) -> Told:
    """An event for the server."""
    match event:
        case r.Delta():
            return Delta(number, event.index, event.tokens, event.logprobs, _record(event.step))
        case r.Finished():
            error = event.error
            return Finished(
                number, event.index, event.reason, event.matched, event.usage, event.timings,
                to_failure(error) if error is not None else None, event.constraint, event.own,
            )  # fmt: skip
        case r.SegmentFinished():
            return SegmentFinished(
                number, event.index, event.reason, event.matched, event.usage, event.timings,
                event.constraint,
            )  # fmt: skip
        case r.Started():
            return Started(number, event.index, event.cached_tokens, event.queue_ms)
        case r.PromptScored():
            return PromptScored(number, event.index, event.logprobs)


def from_told(told: Told, request: r.Request) -> r.Event:
    """The event again, about the server's own request."""
    match told:
        case Delta():
            step = r.StepRecord(*told.step)
            return r.Delta(request, told.index, told.tokens, told.logprobs, step)
        case Finished():
            error = told.error
            return r.Finished(
                request, told.index, told.reason, told.matched, told.usage, told.timings,
                from_failure(error) if error is not None else None, told.constraint, told.own,
            )  # fmt: skip
        case SegmentFinished():
            return r.SegmentFinished(
                request, told.index, told.reason, told.matched, told.usage, told.timings,
                told.constraint,
            )  # fmt: skip
        case Started():
            return r.Started(request, told.index, told.cached_tokens, told.queue_ms)
        case PromptScored():
            return r.PromptScored(request, told.index, told.logprobs)


def to_failure(error: r.RequestError) -> Failure:
    """An error for the server."""
    said = str(error)
    if error.field:
        said = said.removeprefix(f"{error.field}: ")
    return Failure(error.field, said, error.code, error.retry_after_ms)


def from_failure(failure: Failure) -> r.RequestError:
    """The error again."""
    error = r.RequestError(failure.field, failure.message, failure.code)
    error.retry_after_ms = failure.retry_after_ms
    return error
