"""Both links between loop and engine: order, one hop per step, death, and who is told what.

A fake engine publishes what a test hands it, in a thread beside the loop or behind a socketpair as
in a process of its own; nothing here loads a model.
"""

from __future__ import annotations

import asyncio
import gc
import queue
import sys
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from typing import Any

import pytest

from spec_serve.api.link import SWITCH_INTERVAL, EngineLink, ThreadLink, host_froze
from spec_serve.api.process_link import link_to
from spec_serve.spec.admission import EngineInfo, Limits
from spec_serve.spec.request import (
    Event,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Started,
    Usage,
)
from spec_serve.spec.stats import EngineStats
from tests.api.hosted import KINDS, hosted

both = pytest.mark.parametrize("kind", KINDS)

INFO = EngineInfo("tiny", "none", 10, 64, 64, 4, "float32", "cpu", 0, ())


class Handed:
    """Publishes the lists of events put into `steps`; None ends it, an exception is raised."""

    info = INFO
    limits = Limits(max_waiting=8)
    blocks = None

    def __init__(self) -> None:
        self.steps: queue.Queue[list[Event] | Exception | None] = queue.Queue()
        self.submitted: list[str] = []
        self.cancelled: list[str] = []
        self.refuse: RequestError | None = None
        self.thread: int | None = None
        self.drained = False

    def validate(self, request: Request) -> None:
        return None

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.submitted.append(request.id)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def run(self, publish: Callable[[list[Event]], None]) -> None:
        self.thread = threading.get_ident()
        while (step := self.steps.get()) is not None:
            if isinstance(step, Exception):
                raise step
            publish(step)

    def drain(self) -> None:
        self.drained = True

    def stop(self) -> None:
        self.steps.put(None)

    def idle(self) -> bool:
        return True

    def flush(self) -> Future[int]:
        done: Future[int] = Future()
        done.set_result(5)
        return done

    def stats(self) -> EngineStats:
        return EngineStats(steps=7)


def started(request: Request, index: int = 0) -> Started:
    return Started(request, index, 0, 0.0)


def finished(request: Request, index: int = 0) -> Finished:
    usage, timings = Usage(1, 0, 0), RequestTimings(0, 0, 0, 0)
    return Finished(request, index, "stop", None, usage, timings)


async def until(true: Callable[[], Any]) -> None:
    async with asyncio.timeout(60):
        while not true():
            await asyncio.sleep(0.001)


async def settled(engine: Handed, ids: list[str]) -> None:
    """Wait until the engine has heard of these requests."""
    await until(lambda: engine.submitted == ids)


def in_loop(test: Callable[[Handed, EngineLink], Awaitable[None]], kind: str) -> Handed:
    """Run a test with a started link, and stop it afterwards."""
    engine = Handed()

    def died() -> None:
        raise AssertionError("the engine died")

    async def whole() -> None:
        link = link_to(hosted(engine) if kind == "process" else engine, died)
        link.start()
        try:
            await test(engine, link)
        finally:
            assert await link.stop()
        assert not link.alive

    asyncio.run(whole())
    return engine


@both
def test_events_reach_their_sinks_in_order_in_the_loops_thread(kind: str) -> None:
    async def test(engine: Handed, link: EngineLink) -> None:
        seen: list[tuple[str, type, int]] = []

        def sink(event: Event) -> None:
            seen.append((event.request.id, type(event), threading.get_ident()))

        one, two = (Request(id, [1], sink=sink) for id in ("one", "two"))
        for request in (one, two):
            link.submit(request)
        assert not link.idle()
        await settled(engine, ["one", "two"])
        engine.steps.put([started(one), started(two)])
        engine.steps.put([finished(two), finished(one)])
        await until(link.idle)
        here = threading.get_ident()
        assert seen == [
            ("one", Started, here), ("two", Started, here),
            ("two", Finished, here), ("one", Finished, here),
        ]  # fmt: skip
        assert engine.thread not in (None, here)
        assert link.stats().steps == 7

    in_loop(test, kind)


def test_one_hop_per_step() -> None:
    async def test(engine: Handed, link: EngineLink) -> None:
        loop = asyncio.get_running_loop()
        hops: list[object] = []
        real = loop.call_soon_threadsafe

        def counted(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
            hops.append(callback)
            return real(callback, *args, **kwargs)

        loop.call_soon_threadsafe = counted  # type: ignore[method-assign, assignment]
        requests = [Request(str(i), [1], sink=lambda event: None) for i in range(50)]
        for request in requests:
            link.submit(request)
        engine.steps.put([started(r) for r in requests])
        engine.steps.put([finished(r) for r in requests])
        await until(link.idle)
        loop.call_soon_threadsafe = real  # type: ignore[method-assign]
        assert len(hops) == 2

    in_loop(test, "thread")


@both
def test_a_request_is_live_until_its_last_choice_ends(kind: str) -> None:
    async def test(engine: Handed, link: EngineLink) -> None:
        request = Request("r", [1], n=2)
        link.submit(request)
        with pytest.raises(RequestError) as caught:
            link.submit(Request("r", [1]))
        assert caught.value.code == "duplicate_id"
        await settled(engine, ["r"])
        engine.steps.put([finished(request, 1)])
        other = Request("other", [1])
        link.submit(other)
        await settled(engine, ["r", "other"])
        engine.steps.put([finished(other)])
        await until(lambda: not link.runs("other"))
        assert not link.idle()
        engine.steps.put([finished(request, 0)])
        await until(link.idle)
        link.submit(Request("r", [1]))  # the id is free again

    in_loop(test, kind)


def test_a_refused_request_leaves_nothing_behind() -> None:
    async def test(engine: Handed, link: EngineLink) -> None:
        engine.refuse = RequestError("", "full", "overloaded")
        with pytest.raises(RequestError):
            link.submit(Request("r", [1]))
        assert link.idle()
        engine.refuse = None
        link.submit(Request("r", [1]))

    in_loop(test, "thread")


@both
def test_one_sinks_trouble_is_not_the_others(
    kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(engine: Handed, link: EngineLink) -> None:
        def bad(event: Event) -> None:
            raise RuntimeError("broken")

        seen: list[Event] = []
        one, two = Request("one", [1], sink=bad), Request("two", [1], sink=seen.append)
        link.submit(one)
        link.submit(two)
        await settled(engine, ["one", "two"])
        engine.steps.put([started(one), started(two)])
        await until(lambda: seen)
        await until(lambda: engine.cancelled == ["one"])

    in_loop(test, kind)
    assert "broken" in caplog.text


@both
def test_cancel_and_drain_reach_the_engine(kind: str) -> None:
    async def test(engine: Handed, link: EngineLink) -> None:
        for name in ("a", "b"):
            link.submit(Request(name, [1]))
        link.cancel("nobody's")
        link.cancel("a")
        await until(lambda: "a" in engine.cancelled)
        link.cancel_all()
        await until(lambda: engine.cancelled[-2:] == ["a", "b"])
        link.drain()
        await until(lambda: engine.drained)

    in_loop(test, kind)


def test_the_engines_death_is_told_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    engine = Handed()

    async def whole() -> None:
        dead = asyncio.Event()
        link = ThreadLink(engine, dead.set)
        with pytest.raises(RequestError):
            link.submit(Request("early", [1]))
        link.start()
        seen: list[Event] = []
        request = Request("r", [1], n=2, sink=seen.append)
        link.submit(request)
        engine.steps.put([finished(request, 0)])
        engine.steps.put(RuntimeError("out of luck"))
        async with asyncio.timeout(60):
            await dead.wait()
        ends = [event for event in seen if isinstance(event, Finished)]
        assert [(end.index, end.reason) for end in ends] == [(0, "stop"), (1, "error")]
        assert ends[1].error is not None and ends[1].error.code == "engine_error"
        assert "luck" not in str(ends[1].error)
        assert link.idle() and not link.alive
        with pytest.raises(RequestError):
            link.submit(Request("late", [1]))
        assert await link.stop()

    asyncio.run(whole())
    assert "out of luck" in caplog.text


def test_the_switch_interval_is_short_while_it_runs_and_put_back() -> None:
    before = sys.getswitchinterval()

    async def test(engine: Handed, link: EngineLink) -> None:
        assert sys.getswitchinterval() == pytest.approx(SWITCH_INTERVAL)

    in_loop(test, "thread")
    assert sys.getswitchinterval() == before


@pytest.mark.parametrize("frozen", [False, True])
def test_objects_are_frozen_while_it_runs_unless_the_host_has_done_so(frozen: bool) -> None:
    gc.unfreeze()
    if frozen:
        gc.freeze()
    host_froze.cache_clear()
    before = gc.get_freeze_count()

    async def test(engine: Handed, link: EngineLink) -> None:
        # A count may fall, as frozen objects are freed like others.
        assert (0 < gc.get_freeze_count() <= before) if frozen else gc.get_freeze_count() > 0

    try:
        in_loop(test, "thread")
        assert (gc.get_freeze_count() > 0) == frozen
    finally:
        gc.freeze()  # as tests/conftest.py has it
        host_froze.cache_clear()
