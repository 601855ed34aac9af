"""A fault in every stage of the engine, through both links: it costs the requests it concerns.

The tiny real engine, with one stage made to fail for the request called "bad".
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest

from spec_serve.api.link import EngineLink
from spec_serve.api.process_link import link_to
from spec_serve.spec.engine import Engine
from spec_serve.spec.request import Delta, Event, Finished, Request, RequestError, Stopping
from tests.api.hosted import KINDS, hosted
from tests.api.serving import until
from tests.engines import PROMPT, engine, prompts, reference

BAD = prompts(1, 30, 34, seed=11)[0]
LENGTH = 24


class Asked:
    """A request and what came of it."""

    def __init__(self, link: EngineLink, id: str, prompt: list[int], **fields: Any) -> None:
        self.events: list[Event] = []
        fields.setdefault("stopping", Stopping(max_tokens=LENGTH))
        self.refused: Exception | None = None
        try:
            link.submit(Request(id, list(prompt), sink=self.events.append, **fields))
        except Exception as error:
            self.refused = error

    @property
    def ends(self) -> list[Finished]:
        return [event for event in self.events if isinstance(event, Finished)]

    @property
    def ids(self) -> list[int]:
        return [t for event in self.events if isinstance(event, Delta) for t in event.tokens]

    @property
    def code(self) -> str:
        """How it failed; "" if it did not."""
        if self.refused is not None:
            return getattr(self.refused, "code", type(self.refused).__name__)
        (end,) = self.ends
        return end.error.code if end.error is not None else ""


def run(made: Engine, kind: str, test: Callable[[EngineLink], Any]) -> None:
    async def whole() -> None:
        link = link_to(hosted(made) if kind == "process" else made, lambda: None)
        link.start()
        try:
            await test(link)
        finally:
            assert await link.stop()

    asyncio.run(whole())


def failing(real: Callable[..., Any], when: Callable[..., bool]) -> Callable[..., Any]:
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if when(*args, **kwargs):
            raise RuntimeError("injected")
        return real(*args, **kwargs)

    return wrapped


def is_bad(row: Any, *_: Any) -> bool:
    return bool(row.request.id == "bad")


def in_submit(made: Engine) -> None:
    made.submit = failing(made.submit, lambda request: request.id == "bad")  # type: ignore[method-assign]


def in_open(made: Engine) -> None:
    made.builder.open = failing(made.builder.open, is_bad)  # type: ignore[method-assign]


def in_sources(made: Engine) -> None:
    made.builder._sources = failing(made.builder._sources, is_bad)


def in_build(made: Engine) -> None:
    made.builder.build = failing(  # type: ignore[method-assign]
        made.builder.build, lambda picked: any(row.request.id == "bad" for row, _ in picked)
    )


def in_the_device(made: Engine) -> None:
    def holds(job: Any) -> bool:
        return any(row.request.id == "bad" for row in made.scheduler.running if row in taken[0])

    taken: list[list[Any]] = [[]]
    build = made.builder.build

    def built(picked: Any) -> Any:
        got = build(picked)
        taken[0] = got[1]
        return got

    made.builder.build = built  # type: ignore[method-assign]
    made._device.step = failing(made._device.step, holds)  # type: ignore[method-assign]


def in_commit(made: Engine) -> None:
    made.builder.commit = failing(made.builder.commit, is_bad)  # type: ignore[method-assign]


STAGES = [in_submit, in_open, in_sources, in_build, in_the_device, in_commit]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("inject", STAGES)
def test_a_stage_that_fails_costs_its_own_request(
    inject: Callable[[Engine], None], kind: str
) -> None:
    made = engine("lookup")
    inject(made)

    async def test(link: EngineLink) -> None:
        good = Asked(link, "good", PROMPT)
        bad = Asked(link, "bad", BAD)
        await until(link.idle)
        assert bad.code in ("engine_error", "RuntimeError") and "injected" not in str(bad.events)
        assert good.code == "" and good.ids == reference()[:LENGTH]
        again = Asked(link, "again", PROMPT)
        await until(link.idle)
        assert again.ids == good.ids and link.alive

    run(made, kind, test)
    made.store.check()
    assert made.idle()


@pytest.mark.parametrize("kind", KINDS)
def test_learning_that_fails_costs_nobody(kind: str) -> None:
    made = engine("lookup")
    made.builder.observe = failing(made.builder.observe, lambda *_: True)  # type: ignore[method-assign]

    async def test(link: EngineLink) -> None:
        good = Asked(link, "good", PROMPT)
        await until(link.idle)
        assert good.ids == reference()[:LENGTH]

    run(made, kind, test)


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_is_not_given_back_costs_no_answer(kind: str) -> None:
    made = engine("lookup")
    made.builder.retire = failing(made.builder.retire, is_bad)  # type: ignore[method-assign]

    async def test(link: EngineLink) -> None:
        bad = Asked(link, "bad", BAD)
        await until(link.idle)
        assert bad.code == "" and len(bad.ids) == LENGTH
        good = Asked(link, "good", PROMPT)
        await until(link.idle)
        assert good.ids == reference()[:LENGTH]

    run(made, kind, test)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("length", [1, LENGTH])
def test_events_that_get_lost_end_their_requests(kind: str, length: int) -> None:
    made = engine("none")
    real = made.run

    def run_(publish: Callable[[list[Event]], None]) -> None:
        real(failing(publish, lambda events: lost(events)))

    losses = [3 if length > 1 else 1]

    def lost(events: list[Event]) -> bool:
        if any(event.request.id == "bad" for event in events):
            losses[0] -= 1
            return losses[0] == 0
        return False

    made.run = run_  # type: ignore[method-assign]

    async def test(link: EngineLink) -> None:
        bad = Asked(link, "bad", BAD, stopping=Stopping(max_tokens=length))
        await until(link.idle)
        assert bad.code == "engine_error" and len(bad.ids) == (2 if length > 1 else 0)
        good = Asked(link, "good", PROMPT)
        await until(link.idle)
        assert good.ids == reference()[:LENGTH] and link.alive

    run(made, kind, test)
    made.store.check()


def test_an_event_that_can_not_be_told_ends_its_request_only() -> None:
    made = engine("none")
    real = made.run

    def spoilt(publish: Callable[[list[Event]], None]) -> None:
        def spoil(events: list[Event]) -> None:
            for event in events:
                if isinstance(event, Delta) and event.request.id == "bad":
                    event.tokens = [object()]  # type: ignore[list-item]
            publish(events)

        real(spoil)

    made.run = spoilt  # type: ignore[method-assign]

    async def test(link: EngineLink) -> None:
        good, bad = Asked(link, "good", PROMPT), Asked(link, "bad", BAD)
        await until(link.idle)
        assert bad.code == "engine_error" and good.ids == reference()[:LENGTH]

    run(made, "process", test)
    made.store.check()


@pytest.mark.parametrize("kind", KINDS)
def test_flush_drops_what_nobody_stands_on(kind: str) -> None:
    made = engine("none")

    async def test(link: EngineLink) -> None:
        assert await link.flush() == 0  # with nothing to do, too
        Asked(link, "one", PROMPT)
        await until(link.idle)
        running = Asked(link, "two", BAD, stopping=Stopping(max_tokens=1000))
        await until(lambda: running.ids)
        held = len(PROMPT) + LENGTH - 1  # the newest token is not in the cache
        assert made.store.matched([*PROMPT, *reference()[:LENGTH]]) == held
        assert await link.flush() == held
        assert made.store.matched(PROMPT) == 0
        link.cancel("two")
        await until(link.idle)
        assert (await link.flush()) >= len(BAD)
        Asked(link, "three", PROMPT)
        await until(link.idle)

    run(made, kind, test)
    made.store.check()

    async def late() -> None:
        with pytest.raises(RequestError, match="not running"):
            await link_to(made, lambda: None).flush()

    asyncio.run(late())
    assert made.flush().result(1) == 0


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("jump", [1e9, -1e9])
def test_a_clock_that_jumps_moves_no_deadline(
    kind: str, jump: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = engine("none")
    real = time.time

    async def test(link: EngineLink) -> None:
        stopping = Stopping(max_tokens=900)
        soon = Asked(link, "soon", BAD, stopping=stopping, deadline=time.monotonic() + 0.1)
        late = Asked(link, "late", PROMPT, deadline=time.monotonic() + 60)
        await until(lambda: late.events)
        monkeypatch.setattr(time, "time", lambda: real() + jump)
        await until(link.idle)
        assert soon.code == "timeout" and late.code == ""

    run(made, kind, test)
