"""What passes between server and engine arrives as it was sent, however the socket cuts it."""

from __future__ import annotations

import asyncio
import math
import socket
from dataclasses import fields
from typing import Any, cast, get_args, get_type_hints

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_serve.api import process_messages as p
from spec_serve.api.process_channel import LARGEST, Channel, Frames, LoopChannel, framed
from spec_serve.api.text import StopStrings, StopWatch
from spec_serve.spec.admission import EngineInfo, Limits
from spec_serve.spec.request import (
    Constrained,
    Constraint,
    Delta,
    Event,
    Finished,
    PromptScored,
    Request,
    RequestError,
    RequestTimings,
    Sampling,
    Speculation,
    Started,
    StepRecord,
    Stopping,
    TokenLogprob,
    Usage,
)
from spec_serve.spec.stats import EngineStats
from tests.api.echo import ByteTokens

TOKENS = ByteTokens()
ids = st.integers(0, 2**31 - 1)
text = st.text(max_size=8)
numbers = st.floats(-1000, 1000)
stops = st.lists(st.text(min_size=1, max_size=4), min_size=1, max_size=3)
whole = st.integers(0, 2**63 - 1)

samplings = st.builds(
    Sampling,
    temperature=st.floats(0, 100) | st.just(0),
    top_k=st.integers(0, 2**31 - 1),
    seed=st.none() | st.integers(-(2**63), 2**64 - 1),
    logit_bias=st.dictionaries(ids, numbers, max_size=3),
    bad_words=st.lists(st.lists(ids, min_size=1, max_size=3).map(tuple), max_size=3).map(tuple),
)
stoppings = st.builds(
    Stopping,
    max_tokens=st.none() | whole,
    min_tokens=whole,
    eos=st.frozensets(ids, max_size=3),
    token_ids=st.frozensets(ids, max_size=3),
    ignore_eos=st.booleans(),
    watch=st.none()
    | st.builds(
        StopWatch, st.just(TOKENS), stops.map(StopStrings), st.booleans(), st.frozensets(ids)
    ),
)
requests = st.builds(
    Request,
    id=text,
    prompt=st.lists(ids, max_size=50),
    sampling=samplings,
    stopping=stoppings,
    speculation=st.builds(
        Speculation,
        mode=st.sampled_from(["auto", "off", "max"]),
        max_nodes=st.none() | st.integers(0, 2**31 - 1),
        sources=st.none() | st.frozensets(text, max_size=2),
        prediction=st.lists(ids, max_size=5).map(tuple),
    ),
    constraint=st.none()
    | st.builds(
        Constraint,
        kind=st.sampled_from(["text", "regex", "json_schema", "choices"]),
        source=text,
        whitespace=st.sampled_from(["bounded", "compact", "any"]),
        strict=st.booleans(),
        max_chars=st.none() | whole,
        banned=st.lists(text, max_size=2).map(tuple),
        after=text,
    ),
    n=st.integers(1, 8),
    logprobs=st.none() | st.integers(0, 20),
    prompt_logprobs=st.none() | st.integers(0, 20),
    salt=text,
    priority=st.integers(-(2**31), 2**31 - 1),
    deadline=st.none() | st.floats(0, 1e9),
    continuations=st.lists(st.lists(ids, max_size=3).map(tuple), max_size=3).map(tuple),
)


@given(requests, whole)
def test_a_request_arrives_as_it_was(request: Request, number: int) -> None:
    sent = p.for_engine(p.encode(p.to_submit(number, request)))
    assert isinstance(sent, p.Submit) and sent.number == number
    got = p.from_submit(sent, TOKENS)
    own = {"stopping", "sink", "tag", "trace"}
    for field in fields(Request):
        if field.name not in own:
            assert getattr(got, field.name) == getattr(request, field.name), field.name
    for field in fields(Stopping):
        if field.name != "watch":
            assert getattr(got.stopping, field.name) == getattr(request.stopping, field.name)
    watch, told = request.stopping.watch, got.stopping.watch
    if watch is None:
        assert told is None
    else:
        assert isinstance(watch, StopWatch) and isinstance(told, StopWatch)
        assert told.stops.strings == watch.stops.strings
        assert told.skip_special == watch.skip_special and told.tokenizer is TOKENS
        assert told.shown == watch.shown


def test_every_field_of_a_request_is_sent_or_stays_for_a_reason() -> None:
    # The server's own, never looked at by the engine; grammars are compiled there anew.
    stays = {"sink", "tag", "trace", "compiled"}
    assert {f.name for f in fields(Request)} - stays == set(p.Submit.__struct_fields__) - {"number"}
    watch = {f.name for f in fields(StopWatch)} - {"tokenizer"}
    sent = {f.name for f in fields(Stopping)} - {"watch"} | watch
    assert sent == set(p.Ends.__struct_fields__)


def test_a_step_record_is_sent_as_what_it_is() -> None:
    assert tuple(get_type_hints(StepRecord).values()) == get_args(p.Record)


REQUEST = Request("r", [1])
RECORD = StepRecord(3, 2, 1, {"ngram": (2, 1)}, 5, 6, 7, 8, [9, 10], [-1, 0])
SCORED = [TokenLogprob(5, -math.inf, [(6, -0.25), (7, -9999.0)])]
LATE = RequestError("deadline", "the deadline has passed", "timeout")
EVENTS: list[Event] = [
    Started(REQUEST, 1, 5, 2.5),
    PromptScored(REQUEST, 0, SCORED),
    Delta(REQUEST, 2, [1, 2], None, RECORD),
    Delta(REQUEST, 2, [], SCORED, RECORD),
    Finished(REQUEST, 0, "stop", 7, Usage(1, 2, 3, 4, 5), RequestTimings(1, 2, 3, 4)),
    Finished(REQUEST, 0, "stop", "\U0001f600", Usage(1, 2, 3), RequestTimings(1, 2, 3, 4)),
    Finished(
        REQUEST, 0, "stop", None, Usage(1, 2, 3), RequestTimings(1, 2, 3, 4),
        constraint=Constrained(True, ("not",), False, 3),
    ),  # fmt: skip
    Finished(REQUEST, 0, "error", None, Usage(1, 2, 3), RequestTimings(1, 2, 3, 4), LATE),
]


def test_events_arrive_as_they_were() -> None:
    stats = EngineStats(*range(1, len(fields(EngineStats)) + 1))
    step = p.Step([p.to_told(4, event) for event in EVENTS], 9, stats)
    got = p.for_server(p.encode(step))
    assert isinstance(got, p.Step) and (got.seen, got.stats) == (9, stats)
    for told, event in zip(got.events, EVENTS, strict=True):
        back = p.from_told(told, REQUEST)
        assert told.number == 4 and type(back) is type(event) and back.request is REQUEST
        for field in fields(event):
            if field.name != "error":
                assert getattr(back, field.name) == getattr(event, field.name)
    error = cast(Any, p.from_told(got.events[-1], REQUEST)).error
    assert (error.field, str(error), error.code) == (LATE.field, str(LATE), LATE.code)


def test_what_an_engine_says_of_itself_arrives() -> None:
    info = EngineInfo("m", "d", 5, 6, 7, 8, "float32", "cpu", 9, ("ngram",))
    ready = p.for_server(p.encode(p.Ready(info, Limits(max_waiting=3))))
    assert ready == p.Ready(info, Limits(max_waiting=3))
    for asked in (p.Load({"target": "m", "max_rows": 3}), p.Cancel(3), p.Drain(), p.Stop()):
        assert p.for_engine(p.encode(asked)) == asked


@given(st.lists(st.binary(max_size=300), max_size=6), st.data())
def test_frames_are_whole_however_they_are_cut(payloads: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, payloads))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(stream)), max_size=12)))
    frames = Frames()
    got: list[bytes] = []
    for start, end in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        got += frames.feed(memoryview(stream)[start:end])
    assert got == payloads and not frames._held


def test_a_length_that_can_not_be_is_refused() -> None:
    with pytest.raises(ValueError, match="a frame of"):
        Frames().feed((LARGEST + 1).to_bytes(4, "little"))
    frames = Frames()
    frames.feed(b"\xff")
    with pytest.raises(ValueError, match="a frame of"):
        frames.feed(b"\xff\xff\xff")


@given(st.binary(max_size=60))
def test_noise_is_an_error_and_nothing_worse(noise: bytes) -> None:
    for decode in (p.for_engine, p.for_server):
        try:
            decode(noise)
        except (msgspec.DecodeError, ValueError) as error:
            assert isinstance(error, Exception)


def test_noise_in_a_loop_is_the_end_of_the_channel(caplog: pytest.LogCaptureFixture) -> None:
    async def go() -> None:
        ours, theirs = socket.socketpair()
        lost = asyncio.Event()
        channel = LoopChannel(
            Channel(ours), asyncio.get_running_loop(), lambda data: None, lost.set
        )
        theirs.sendall(b"\xff" * 8)
        await asyncio.wait_for(lost.wait(), 5)
        channel.post(b"late")  # to nobody
        channel.close()
        assert theirs.recv(1) == b""
        theirs.close()

    asyncio.run(go())
    assert "makes no sense" in caplog.text


def test_receiving_waits_as_long_as_told() -> None:
    ours, theirs = socket.socketpair()
    channel, other = Channel(ours), Channel(theirs)
    with pytest.raises(TimeoutError):
        channel.receive(0.01)
    other.send(b"x" * 100_000)
    other.send(b"")
    assert channel.receive(5) == b"x" * 100_000 and channel.receive() == b""
    theirs.close()
    assert channel.receive() is None
    with pytest.raises(OSError):
        channel.send(b"late")
    ours.close()
