"""An engine in a process of its own: what it is told and tells, its death, its server's death."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from spec_serve.api import process_link
from spec_serve.api import process_messages as p
from spec_serve.api.process_child import ChildProcess, launch
from spec_serve.api.process_link import ProcessLink
from spec_serve.api.server import Server
from spec_serve.api.text import StopStrings, StopWatch
from spec_serve.spec.request import Delta, Event, Finished, Request, RequestError, Started, Stopping
from tests.api.echo import ByteTokens
from tests.api.echo_process import COMMAND, TESTS, echo_process
from tests.api.serving import SETTINGS


async def until(holds: Callable[[], object]) -> None:
    """Starting a process takes its time on a busy machine."""
    async with asyncio.timeout(60):
        while not holds():
            await asyncio.sleep(0.005)


class Asked:
    """A request and what was told of it."""

    def __init__(self, link: ProcessLink, id: str, text: str = "abc", **fields: Any) -> None:
        self.events: list[Event] = []
        self.request = Request(id, list(text.encode()), sink=self.events.append, **fields)
        link.submit(self.request)

    @property
    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    @property
    def text(self) -> str:
        deltas = [event for event in self.events if isinstance(event, Delta)]
        return bytes(t for delta in deltas for t in delta.tokens if t < 256).decode()

    async def over(self) -> Asked:
        await until(lambda: len(self.ends) == self.request.n)
        return self


def endless(link: ProcessLink, id: str, **fields: Any) -> Asked:
    return Asked(link, id, "ab", stopping=Stopping(ignore_eos=True), **fields)


@asynccontextmanager
async def linked(
    on_death: Callable[[], None] | None = None, hang_s: float = 0.0, **options: object
) -> AsyncIterator[ProcessLink]:
    link = ProcessLink(echo_process(**options), on_death, hang_s)
    link.start()
    try:
        yield link
    finally:
        assert await link.stop()
        assert not link.alive and link.idle()


def run(test: Coroutine[Any, Any, None]) -> None:
    uvloop.run(test)


def pid(link: ProcessLink) -> int:
    child = link._child
    assert isinstance(child, ChildProcess)
    return child.pid


def test_a_generation_is_told_whole() -> None:
    async def go() -> None:
        async with linked(run=2) as link:
            one = Asked(link, "one", "hello", n=2, logprobs=3)
            assert link.runs("one") and not link.idle() and link.stats().waiting == 2
            with pytest.raises(RequestError) as caught:
                Asked(link, "one")
            assert caught.value.code == "duplicate_id"
            await one.over()
            assert isinstance(one.events[0], Started) and one.events[0].request is one.request
            assert sorted(end.index for end in one.ends) == [0, 1]
            assert {end.reason for end in one.ends} == {"stop"} and one.ends[0].matched == 256
            assert one.ends[0].usage.completion_tokens == 6
            deltas = [e for e in one.events if isinstance(e, Delta) and e.index == 0]
            assert [t for d in deltas for t in d.tokens] == [*b"hello", 256]
            assert deltas[0].step.sources == {"lookup": (2, 1)}
            scored = deltas[0].logprobs
            assert scored is not None and scored[0].logprob == -0.5
            assert scored[0].top == [(t, -math.inf) for t in range(3)]
            assert link.idle() and not link.runs("one")
            await until(lambda: link.stats().finished == 2)
            stats = link.stats()
            assert (stats.running, stats.waiting, stats.requests) == (0, 0, 1)
            assert (await Asked(link, "one", "again").over()).text == "again"
            assert not link._requests and not link._numbers and not len(link._ledger)

    run(go())


def test_stop_strings_are_looked_for_in_the_other_process() -> None:
    async def go() -> None:
        async with linked(run=3) as link:
            watch = StopWatch(ByteTokens(), StopStrings(["three", "zz"]))
            asked = Asked(link, "r", "one two three four", stopping=Stopping(watch=watch))
            await asked.over()
            assert asked.text == "one two three" and asked.ends[0].matched == "three"

            class Other:
                def feed(self, tokens: Any, active_from: int) -> None:
                    return None

            with pytest.raises(TypeError):
                Asked(link, "s", stopping=Stopping(watch=Other))
            assert link.idle()

    run(go())


def test_cancel_deadline_and_refusals() -> None:
    async def go() -> None:
        async with linked(run=1, pause=0.002) as link:
            one, two = endless(link, "one"), endless(link, "two")
            late = endless(link, "late", deadline=time.monotonic() + 0.1)
            await until(lambda: one.text and two.text)
            link.cancel("one")
            await one.over()
            assert one.ends[0].reason == "cancelled" and not two.ends
            await late.over()
            assert late.ends[0].error is not None and late.ends[0].error.code == "timeout"
            assert str(late.ends[0].error) == "deadline: the deadline has passed"
            with pytest.raises(RequestError) as caught:
                Asked(link, "bad", "a" * 5000)
            assert (caught.value.field, caught.value.code) == ("prompt", "context_length_exceeded")
            with pytest.raises(RequestError, match="surrogate"):
                Asked(link, "bad", salt="\ud800")
            link.drain()
            with pytest.raises(RequestError) as caught:
                Asked(link, "bad")
            assert caught.value.code == "draining"
            link.cancel_all()
            await two.over()

    run(go())


def test_what_may_wait_is_bounded_here() -> None:
    async def go() -> None:
        async with linked(run=1, pause=0.01) as link:
            most = 1024 + 4
            for i in range(most // 8):
                endless(link, str(i), n=8)
            left = most % 8
            with pytest.raises(RequestError) as caught:
                endless(link, "x", n=left + 1)
            assert caught.value.code == "overloaded"
            link.cancel_all()
            await until(link.idle)
            assert link._ledger.choices == 0

    run(go())


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSEGV])
def test_a_killed_engine_costs_its_requests_and_comes_back(
    how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    async def go() -> None:
        async with linked(run=1, pause=0.002) as link:
            asked = [endless(link, str(i), n=1 + i) for i in range(3)]
            await until(lambda: all(one.text for one in asked))
            first, counted = pid(link), link.stats().requests
            os.kill(first, signal.SIGSTOP)
            await until(lambda: state(first) == "T")
            flushing = asyncio.create_task(link.flush())
            await asyncio.sleep(0)
            os.kill(first, how)
            os.kill(first, signal.SIGCONT)
            await until(lambda: not link.alive)
            for one in asked:
                await one.over()
                error = one.ends[0].error
                assert error is not None and error.code == "engine_error"
                assert "restarting" in str(error) and error.retry_after_ms > 0
            with pytest.raises(RequestError, match="restarting"):
                await flushing
            assert link.idle() and link.restarting and link.stats().running == 0
            with pytest.raises(RequestError) as caught:
                Asked(link, "early")
            assert "restarting" in str(caught.value) and caught.value.retry_after_ms > 0
            await until(lambda: link.alive)
            assert pid(link) != first and not link.restarting
            assert (await Asked(link, "0", "and on").over()).text == "and on"
            await until(lambda: link.stats().requests == counted + 1)
            assert await link.flush() == 0

    run(go())
    assert how.name in caplog.text


@pytest.mark.parametrize("how", ["stopped", "stuck"])
def test_an_engine_that_hangs_is_killed_and_comes_back(
    how: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Loading takes longer than an engine may hang, and doesn't count."""
    pause = 600.0 if how == "stuck" else 0.01

    async def go() -> None:
        async with linked(hang_s=1.2, run=1, pause=pause, load_s=1.5) as link:
            first = pid(link)
            asked = endless(link, "r")
            await until(lambda: asked.text)
            if how == "stopped":
                os.kill(first, signal.SIGSTOP)
            await asked.over()
            error = asked.ends[0].error
            assert error is not None and "restarting" in str(error) and link.restarting
            await until(lambda: link.alive)
            assert pid(link) != first and len(link._deaths) == 1
            if how == "stopped":  # the other one would be stuck again
                assert (await Asked(link, "r", "and on").over()).text == "and on"

    run(go())
    assert "no progress for 1.2 s" in caplog.text


def test_an_engine_that_is_slow_or_idle_does_not_hang() -> None:
    async def go() -> None:
        async with linked(hang_s=1.6, run=1, pause=0.7) as link:
            first = pid(link)
            await asyncio.sleep(2.2)
            asked = endless(link, "r")
            await asyncio.sleep(2.2)
            assert pid(link) == first and len(asked.text) > 1 and not link._deaths
            link.cancel("r")

    run(go())


def test_restarts_leave_nothing_open(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "MOST_DEATHS", 99)
    monkeypatch.setattr(process_link, "FIRST_PAUSE_S", 0.0)

    async def go() -> None:
        async with linked(run=1) as link:
            counts = []
            for i in range(3):
                os.kill(pid(link), signal.SIGKILL)
                await until(lambda: not link.alive)
                await until(lambda: link.alive)
                await Asked(link, str(i)).over()
                counts.append(len(os.listdir("/proc/self/fd")))
            assert len(set(counts)) == 1

    run(go())


def test_too_many_deaths_are_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(process_link, "MOST_DEATHS", 2)
    dead: list[bool] = []

    async def go() -> None:
        link = ProcessLink(echo_process(), lambda: dead.append(True))
        link.start()
        os.kill(pid(link), signal.SIGKILL)
        await until(lambda: not link.alive)
        await until(lambda: link.alive)
        asked = endless(link, "r")
        os.kill(pid(link), signal.SIGKILL)
        await asked.over()
        assert "restarting" not in str(asked.ends[0].error)
        await until(lambda: dead)
        assert not link.alive and not link.restarting
        with pytest.raises(RequestError, match="not running"):
            Asked(link, "late")
        assert await link.stop()

    run(go())
    assert dead == [True]


def test_a_server_whose_engine_keeps_dying_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "MOST_DEATHS", 1)

    async def go() -> None:
        server = Server(echo_process(), ByteTokens(), SETTINGS)
        await server.start()
        assert server.service.ready
        link = server.link
        assert isinstance(link, ProcessLink)
        os.kill(pid(link), signal.SIGKILL)
        async with asyncio.timeout(60):
            assert await server.until_stopped() == 1
        await server.close()

    run(go())


def test_an_engine_that_dies_while_draining_is_not_started_again() -> None:
    async def go() -> None:
        dead: list[bool] = []
        async with linked(lambda: dead.append(True), run=1, pause=0.002) as link:
            asked = endless(link, "r")
            await until(lambda: asked.text)
            link.drain()
            os.kill(pid(link), signal.SIGKILL)
            await asked.over()
            await until(lambda: dead)
            assert not link.alive and not link.restarting

    run(go())


def test_draining_while_the_engine_restarts_leaves_it_alone() -> None:
    async def go() -> None:
        async with linked() as link:
            os.kill(pid(link), signal.SIGKILL)
            await until(lambda: not link.alive)
            await until(lambda: link._channel is not None)
            link.drain()
            await until(lambda: link.alive)
            assert len(link._deaths) == 1
            with pytest.raises(RequestError) as caught:
                Asked(link, "late")
            assert caught.value.code == "draining"

    run(go())


def test_stopping_while_the_engine_restarts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_link, "FIRST_PAUSE_S", 3600.0)

    async def go() -> None:
        for deaths in (1, 2):  # while the next one loads, and in the pause before
            link = ProcessLink(echo_process())
            link.start()
            for _ in range(deaths):
                await until(lambda link=link: link.alive)  # type: ignore[misc]
                os.kill(pid(link), signal.SIGKILL)
                await until(lambda link=link: not link.alive)  # type: ignore[misc]
            assert await link.stop()

    run(go())


def test_signals_of_a_terminal_are_not_the_engines() -> None:
    async def go() -> None:
        async with linked(run=1, pause=0.002) as link:
            asked = endless(link, "r")
            await until(lambda: asked.text)
            for number in (signal.SIGINT, signal.SIGTERM):
                os.kill(pid(link), number)
            assert os.getpgid(pid(link)) != os.getpgid(0)
            before = len(asked.text)
            await until(lambda: len(asked.text) > before + 3)
            assert link.alive

    run(go())


def test_an_engine_that_does_not_read_blocks_nobody() -> None:
    async def go() -> None:
        async with linked(run=64, context=100_000) as link:
            os.kill(pid(link), signal.SIGSTOP)
            asked = [Asked(link, str(i), "x" * 90_000, stopping=Stopping(70)) for i in range(20)]
            assert link._channel is not None and link._channel._unsent
            os.kill(pid(link), signal.SIGCONT)
            for one in asked:
                assert (await one.over()).text == "x" * 70

    run(go())


def test_what_can_not_be_loaded_says_why() -> None:
    def start() -> ChildProcess:
        return ChildProcess(COMMAND)

    seen: list[tuple[str, float]] = []

    def told(what: str, share: float) -> None:
        seen.append((what, share))

    with pytest.raises(ValueError, match="^target: no such model$"):
        launch(p.Load({"refuse": "target: no such model"}), told, start)
    with pytest.raises(OSError, match=r"while it was loading \(exit code 7\)"):
        launch(p.Load({"exit": 7}), told, start)
    launch(p.Load({}), told, start).close()
    assert seen == [("target", 0.5)]


def test_the_engine_ends_with_its_server() -> None:
    code = (
        "import sys, types, time; tests = types.ModuleType('tests'); "
        f"tests.__path__ = [{str(TESTS)!r}]; sys.modules['tests'] = tests; "
        "from tests.api.echo_process import echo_process; made = echo_process(); "
        "print(made.child.pid, flush=True); time.sleep(600)"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        engine = int(server.stdout.readline())
        assert state(engine) != "Z"
        server.kill()
    end = time.monotonic() + 60
    while state(engine) != "Z":
        assert time.monotonic() < end, "the engine outlives its server"
        time.sleep(0.01)


def state(pid: int) -> str:
    """Of a process, as the kernel abbreviates it: Z = nothing but an entry of its table."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"
