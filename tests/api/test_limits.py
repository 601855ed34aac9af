"""Who gets in: bounds in all and per key, told when to come back, and balanced books."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spec_serve.api import messages as m
from spec_serve.api.auth import LOCAL, Principal
from spec_serve.api.generation import Generation, Outbox
from spec_serve.api.limits import Admission, Bounds, Bucket, Held
from spec_serve.api.link import ThreadLink
from spec_serve.api.process_child import ChildProcess
from spec_serve.api.process_link import ProcessLink
from spec_serve.api.service import Service
from spec_serve.spec.request import (
    Delta,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Started,
    Usage,
)
from tests.api.echo import ByteTokens, Echo
from tests.api.echo_process import echo_process
from tests.api.serving import until

ALICE, BOB = Principal("alice"), Principal("bob")


class Clock:
    """Time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def request(tokens: int = 10, n: int = 1) -> Request:
    return Request("r", [1] * tokens, n=n)


def refused(ask: Any, *arguments: Any) -> tuple[str, int]:
    """The code and the milliseconds after which to come back."""
    with pytest.raises(RequestError) as caught:
        result = ask(*arguments)
        if hasattr(result, "__enter__"):
            result.__enter__()
    assert caught.value.retry_after_ms > 0
    return caught.value.code, caught.value.retry_after_ms


def end(held: Held, made: Request, completion: int = 0) -> None:
    """The engine's events of a request that was admitted and has ended."""
    for i in range(made.n):
        held.note(Started(made, i, 0, 0.0))
    for i in range(made.n):
        usage, timings = Usage(made.n, 0, completion), RequestTimings(0.0, 0.0, 0.0, 0.0)
        held.note(Finished(made, i, "stop", None, usage, timings))


def test_a_bucket_fills_evenly_and_never_beyond_its_size() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    for _ in range(60):
        assert bucket.wait(1) == 0.0
        bucket.take(1)
    assert bucket.wait(1) == pytest.approx(1.0) and bucket.wait(30) == pytest.approx(30.0)
    clock.now += 0.5
    assert bucket.wait(1) == pytest.approx(0.5)
    clock.now += 0.5
    assert bucket.wait(1) == 0.0
    clock.now += 1e6
    assert bucket.wait(60) == 0.0
    bucket.take(61)  # an hour's rest does not give two minutes' worth
    assert bucket.wait(1) == pytest.approx(2.0)
    assert bucket.wait(1000) == pytest.approx(61.0)  # more than all: full is enough


def test_a_clock_that_jumps_back_neither_gives_nor_takes() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    clock.now -= 500.0
    assert bucket.wait(1) == pytest.approx(1.0)
    clock.now += 1.0
    assert bucket.wait(1) == 0.0


@given(
    st.integers(1, 1000),
    st.lists(st.tuples(st.floats(0, 20), st.integers(1, 50)), max_size=40),
)
def test_a_bucket_lets_no_more_through_than_it_may(
    size: int, steps: list[tuple[float, int]]
) -> None:
    clock = Clock()
    bucket, passed, taken = Bucket(size, clock), 0.0, 0
    for pause, amount in steps:
        clock.now += pause
        passed += pause
        amount = min(amount, size)
        if wait := bucket.wait(amount):
            clock.now += wait  # who waits as told gets in
            passed += wait
            assert bucket.wait(amount) == 0.0
        bucket.take(amount)
        taken += amount
        assert taken <= size + passed * size / 60.0 + 1e-3


def test_so_many_wait_and_no_more() -> None:
    admission = Admission(Bounds(queue=2), rows=3)
    made = [request(n=2), request(n=1), request(n=2)]
    held = [admission.enter(LOCAL, one) for one in made]
    assert refused(admission.enter, LOCAL, request()) == ("overloaded", 1000)
    assert refused(admission.reading, LOCAL, 1, 0) == ("overloaded", 1000)
    end(held[1], made[1])
    assert refused(admission.enter, LOCAL, request(n=2))[0] == "overloaded"
    with admission.reading(LOCAL, 1, 5):  # what is being read takes a place too
        assert refused(admission.enter, LOCAL, request())[0] == "overloaded"
    held.append(admission.enter(LOCAL, made[1]))
    for one, its in zip((held[0], held[2], held[3]), (made[0], made[2], made[1]), strict=True):
        end(one, its)
    assert admission.inside == admission.waiting_tokens == 0
    # More choices than fit at all get their turn when nothing else is there.
    many = request(n=8)
    end(admission.enter(LOCAL, many), many)
    assert admission.inside == 0


def test_so_much_text_waits_and_no_more() -> None:
    admission = Admission(Bounds(queue_tokens=100), rows=1)
    first, second = request(tokens=150), request(tokens=60)
    held = admission.enter(LOCAL, first)  # nothing waits, so it may, whatever its size
    assert refused(admission.reading, LOCAL, 1, 1)[0] == "overloaded"
    held.note(Started(first, 0, 0, 0.0))
    other = admission.enter(LOCAL, second)
    assert refused(admission.reading, LOCAL, 1, 41)[0] == "overloaded"
    with admission.reading(LOCAL, 1, 40):
        assert refused(admission.reading, LOCAL, 1, 1)[0] == "overloaded"
    end(held, first)
    end(other, second)
    assert admission.inside == admission.waiting_tokens == 0


def test_a_key_has_its_own_bounds() -> None:
    admission = Admission(Bounds(parallel=2), rows=8)
    made = request(n=2)
    held = admission.enter(ALICE, made)
    assert refused(admission.enter, ALICE, request())[0] == "rate_limited"
    assert refused(admission.reading, ALICE, 1, 1)[0] == "rate_limited"
    with admission.reading(BOB, 2, 1):
        assert refused(admission.reading, BOB, 1, 1)[0] == "rate_limited"
    end(held, made)
    three = request(n=3)
    held = admission.enter(ALICE, three)  # more than its bound, but nothing else of it runs
    assert refused(admission.enter, ALICE, request())[0] == "rate_limited"
    end(held, three)
    with admission.reading(ALICE, 1, 1):
        pass


def test_requests_a_minute() -> None:
    clock = Clock()
    admission = Admission(Bounds(requests=6), rows=8, clock=clock)
    for _ in range(6):
        with admission.reading(ALICE, 1, 1):
            pass
    assert refused(admission.reading, ALICE, 1, 1) == ("rate_limited", 10_000)
    with admission.reading(BOB, 1, 1):
        pass
    clock.now += 10.0
    with admission.reading(ALICE, 1, 1):
        pass
    assert refused(admission.reading, ALICE, 1, 1) == ("rate_limited", 10_000)
    assert admission.inside == 0


def test_tokens_a_minute_are_those_of_prompts_and_answers() -> None:
    clock = Clock()
    admission = Admission(Bounds(tokens=60), rows=8, clock=clock)
    assert refused_never(admission, ALICE, 500)  # more than a minute's worth, of a full bucket
    made = request(tokens=20, n=2)
    held = admission.enter(ALICE, made)
    assert refused(admission.reading, ALICE, 1, 41) == ("rate_limited", 1000)
    end(held, made, completion=35)  # each
    assert refused(admission.reading, ALICE, 1, 1) == ("rate_limited", 31_000)  # 20 + 70 - 60 + 1
    assert refused_never(admission, BOB, 60)
    clock.now += 31.0
    assert refused_never(admission, ALICE, 1)
    dropped = admission.enter(ALICE, request(tokens=1))
    dropped.drop()  # was never submitted: costs nothing
    assert refused_never(admission, ALICE, 1)
    assert admission.inside == admission.waiting_tokens == 0


def refused_never(admission: Admission, who: Principal, tokens: int) -> bool:
    with admission.reading(who, 1, tokens):
        return True


@asynccontextmanager
async def serving(
    bounds: Bounds, tokenizer: ByteTokens | None = None, **engine: Any
) -> AsyncIterator[Service]:
    link = ThreadLink(Echo(**engine))
    link.start()
    service = Service(link, tokenizer or ByteTokens(), "echo", bounds=bounds)
    try:
        yield service
    finally:
        await link.stop()
        service.close()


class Asked:
    """One generation over the service, as a transport makes it."""

    def __init__(self, service: Service, gen: str = "g", who: Principal = LOCAL) -> None:
        self.service, self.gen, self.who = service, gen, who
        self.outbox = Outbox(lambda: None)
        self.over = asyncio.Event()
        self.messages: list[Any] = []
        self.generation: Generation | None = None

    async def begin(self, **fields: Any) -> Asked:
        wire = m.generate({"gen": self.gen, "prompt": "hello", **fields})
        prepared = await self.service.prepare(wire, principal=self.who)
        self.generation = self.service.start(
            prepared, self.gen, self.outbox, lambda gen: self.over.set()
        )
        return self

    async def end(self) -> Any:
        """The last message."""
        await asyncio.wait_for(self.over.wait(), 60)
        return self.outbox.take()[-1]


def test_the_books_are_balanced_whatever_becomes_of_requests() -> None:
    async def go() -> None:
        bounds = Bounds(queue=50, queue_tokens=10_000, parallel=50, requests=600, tokens=100_000)
        async with serving(bounds, pause=0.005, context=64) as service:
            admission = service.admission
            asked = [await Asked(service, who=ALICE).begin(sampling={"n": 2}) for _ in range(10)]
            assert admission.inside == 20 and admission.waiting_tokens > 0
            assert asked[0].generation is not None
            service.link.cancel(asked[0].generation.id)
            late = await Asked(service).begin(timeout_s=0.05, ignore_eos=True)
            wire = m.generate({"gen": "g", "prompt": "x"})
            assert late.generation is not None
            prepared = await service.prepare(wire, late.generation.id)
            with pytest.raises(RequestError, match="running"):
                service.start(prepared, "g", Outbox(lambda: None), lambda gen: None)
            await service.prepare(wire)  # and never started
            wrong = ({"prompt": ""}, {"prompt": "x" * 64}, {"model": "none"}, {"prompt": "\ud800"})
            for fields in wrong:
                with pytest.raises(RequestError):
                    await Asked(service).begin(**fields)
            reasons = [await one.end() for one in asked]
            assert isinstance(await late.end(), m.Error)
            assert {getattr(one, "reason", "") for one in reasons} <= {"stop", "cancelled"}
            await until(lambda: admission.inside == 0)
            assert admission.waiting_tokens == 0
            assert all(share.running == 0 for share in admission._shares.values())

    asyncio.run(go())


class Slow(ByteTokens):
    """Notes what it reads; takes its time for it."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.seconds, self.read = seconds, 0

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.read += 1
        time.sleep(self.seconds)
        return super().encode(text, **kwargs)


class Waiting(ByteTokens):
    """Reads when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        assert self.go_on.wait(60)
        return super().encode(text, **kwargs)


def test_what_has_no_room_is_refused_unread() -> None:
    async def go() -> None:
        tokenizer = Slow(0.1)
        async with serving(Bounds(queue=1), tokenizer, pause=0.01, rows=1) as service:
            long = {"prompt": "x" * 3000, "max_tokens": 5}  # is read beside the loop
            tasks = [asyncio.create_task(Asked(service).begin(**long)) for _ in range(40)]
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            early = [task for task in tasks if task.done()]
            assert len(early) == 38  # before anything was read to its end
            await asyncio.wait(tasks)
            errors = [task.exception() for task in tasks if task.exception() is not None]
            assert len(errors) == 38 and tokenizer.read == 2
            assert {error.code for error in errors} == {"overloaded"}  # type: ignore[union-attr]
            for task in tasks:
                if task.exception() is None:
                    assert (await task.result().end()).reason == "length"
            await until(lambda: service.admission.inside == 0)

    asyncio.run(go())


def test_reading_that_is_broken_off_frees_its_place() -> None:
    async def go() -> None:
        tokenizer = Waiting()
        async with serving(Bounds(queue=1), tokenizer, rows=1) as service:
            for _ in range(5):
                tokenizer.go_on.clear()
                task = asyncio.create_task(Asked(service).begin(prompt="x" * 3000))
                await until(lambda: service.admission.inside)
                assert service.admission.inside == 1
                task.cancel()
                await asyncio.wait({task})
                assert service.admission.inside == 0
                tokenizer.go_on.set()

    asyncio.run(go())


def test_a_first_token_that_is_late_ends_the_request() -> None:
    async def go() -> None:
        async with serving(Bounds(), pause=0.02, rows=1) as service:
            first = await Asked(service, "first").begin(ignore_eos=True, max_tokens=3000)
            await until(lambda: len(first.outbox) > 1)
            service.admission.bounds = Bounds(first_token_s=0.15)
            second = await Asked(service, "second").begin(sampling={"n": 2})
            late = await second.end()
            assert isinstance(late, m.Error) and late.code == "timeout" and late.gen == "second"
            assert late.message == "no token came within 0.15 s"
            assert second.generation is not None
            await until(lambda: not service.link.runs(second.generation.id))  # type: ignore[union-attr]
            assert not first.over.is_set()
            assert first.generation is not None
            service.link.cancel(first.generation.id)
            assert (await first.end()).reason == "cancelled"
            await until(lambda: service.admission.inside == 0)
            assert not second.outbox.take()

    asyncio.run(go())


def test_everything_together_takes_so_long_and_no_longer() -> None:
    async def go() -> None:
        async with serving(Bounds(total_s=0.1), pause=0.01) as service:
            begun = time.monotonic()
            asked = await Asked(service).begin(ignore_eos=True, max_tokens=4000)
            assert asked.generation is not None
            late = await asked.end()
            assert isinstance(late, m.Error) and late.code == "timeout"
            assert time.monotonic() - begun >= 0.1
            own = await Asked(service).begin(ignore_eos=True, timeout_s=0.01)
            assert (await own.end()).code == "timeout"

    asyncio.run(go())


def test_an_engine_that_is_away_is_come_back_to() -> None:
    async def go() -> None:
        async with serving(Bounds()) as service:
            prepared = await service.prepare(m.generate({"gen": "g", "prompt": "x"}))
            service.link._dead = True  # type: ignore[attr-defined]
            assert not service.ready
            with pytest.raises(RequestError, match="not running") as early:
                await Asked(service).begin()
            with pytest.raises(RequestError, match="not running") as later:
                service.start(prepared, "g", Outbox(lambda: None), lambda gen: None)
            for caught in (early, later):
                assert (caught.value.code, caught.value.retry_after_ms) == ("overloaded", 2000)
            assert service.admission.inside == 0

    asyncio.run(go())


def test_an_engine_that_dies_frees_all_that_its_requests_held() -> None:
    async def go() -> None:
        link = ProcessLink(echo_process(pause=0.005, rows=16))
        link.start()
        service = Service(link, ByteTokens(), "echo", bounds=Bounds(queue=8, first_token_s=30.0))
        try:
            async with asyncio.timeout(60):
                endless = {"ignore_eos": True, "sampling": {"n": 2}}
                asked = [await Asked(service, str(i)).begin(**endless) for i in range(4)]
                await until(lambda: all(len(one.outbox) > 2 for one in asked))
                assert service.admission.inside == 8 and len(service.admission.live) == 4
                assert isinstance(link._child, ChildProcess)
                os.kill(link._child.pid, signal.SIGKILL)
                ends = [await one.end() for one in asked]
                assert {one.code for one in ends} == {"engine_error"}
                assert service.admission.inside == service.admission.waiting_tokens == 0
                assert not service.admission.live and not service.ready
                with pytest.raises(RequestError) as caught:
                    await Asked(service).begin()
                assert (caught.value.code, caught.value.retry_after_ms) == ("overloaded", 2000)
                while not service.ready:
                    await asyncio.sleep(0.01)
                assert (await (await Asked(service).begin()).end()).reason == "stop"
        finally:
            await link.stop()
            service.close()

    asyncio.run(go())


def test_a_delta_alone_stops_the_clock() -> None:
    """What the engine says of other choices or of the queue is no token."""

    async def go() -> None:
        admission = Admission(Bounds(first_token_s=0.05), rows=1)
        made = request(n=2)
        cancelled: list[str] = []
        held, told = admission.enter(LOCAL, made), []
        held.sink = told.append
        held.expect(0.05, cancelled.append)
        held.note(Started(made, 0, 0, 0.0))
        held.note(Delta(made, 0, [1], None, None))  # type: ignore[arg-type]
        await asyncio.sleep(0.1)
        assert cancelled == told == []
        end(held, made)
        assert admission.inside == 0

    asyncio.run(go())
