"""Sessions apart from sockets: numbering, acknowledging, dropping, resuming; events by hand."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest
import uvloop

from spec_serve.api import messages as m
from spec_serve.api import session as module
from spec_serve.api import session_shelf as shelf
from spec_serve.api.auth import LOCAL, Principal
from spec_serve.api.service import Service
from spec_serve.api.session import Session
from spec_serve.spec.request import (
    Delta,
    Finished,
    Request,
    RequestError,
    RequestTimings,
    Started,
    StepRecord,
    Usage,
)
from tests.api.echo import ByteTokens, Echo


class Link:
    """An engine link whose events the test makes."""

    alive = True

    def __init__(self) -> None:
        self.info = Echo().info
        self.requests: list[Request] = []
        self.cancelled: list[str] = []
        self.refuse: RequestError | None = None

    def validate(self, request: Request) -> None: ...

    def submit(self, request: Request) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.requests.append(request)

    def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)


class Table:
    """A service with a scripted engine, and its clients."""

    def __init__(self) -> None:
        self.link = Link()
        self.service = Service(self.link, ByteTokens(), "echo")  # type: ignore[arg-type]
        self.closed: list[int] = []

    def session(self, principal: Principal = LOCAL) -> Session:
        return Session(self.service, principal, lambda: None, self.closed.append)

    async def begin(self, session: Session, gen: str = "g", **values: Any) -> Request:
        """A resumable generation, admitted."""
        values = {"gen": gen, "prompt": "x", "resumable": True, "ids": True, **values}
        before = len(self.link.requests)
        session.receive(m.generate(values))
        while len(self.link.requests) == before:
            await asyncio.sleep(0)
        return self.link.requests[-1]


def events(request: Request, deltas: int = 6) -> list[Any]:
    """What an engine would say: its start, deltas of two letters, its end."""
    made: list[Any] = [Started(request, 0, 1, 0.5)]
    for i in range(deltas):
        step = StepRecord(i, 2, 1, {"lookup": (2, 1)}, 1, 2, 3, 1, [], [])
        made.append(Delta(request, 0, [97 + i % 26, 65 + i % 26], None, step))
    usage, timings = Usage(1, 0, 2 * deltas), RequestTimings(1, 2, 3, 4)
    return [*made, Finished(request, 0, "length", None, usage, timings)]


def feed(request: Request, said: list[Any]) -> None:
    assert request.sink is not None
    for event in said:
        request.sink(event)


def drained(session: Session) -> list[Any]:
    taken: list[Any] = []
    while session.waiting:
        taken += session.take()
    return taken


def run(work: Callable[[Table], Awaitable[None]]) -> None:
    async def go() -> None:
        table = Table()
        try:
            await work(table)
        finally:
            table.service.close()

    uvloop.run(go())


def resume(old: Session, gens: dict[str, int]) -> m.Resume:
    return m.Resume(old.resume_token, gens)


async def undisturbed(table: Table, **values: Any) -> list[Any]:
    session = table.session()
    request = await table.begin(session, **values)
    feed(request, events(request))
    return drained(session)


@pytest.mark.parametrize("direct", [False, True])
def test_dropped_anywhere_the_resumed_stream_is_the_undisturbed_one(direct: bool) -> None:
    async def work(table: Table) -> None:
        whole = await undisturbed(table)
        assert [message.seq for message in whole] == list(range(8))
        # Dropped after so many events; the client saw fewer; so many more come before it is back.
        for dropped_at in range(9):
            for seen, meanwhile in itertools.product(range(dropped_at + 1), range(9 - dropped_at)):
                first = table.session()
                got: list[Any] = []
                if direct:
                    first.direct(SimpleNamespace(push=got.append))
                request = await table.begin(first)
                said = events(request)
                for event in said[:dropped_at]:
                    feed(request, [event])
                    got += first.take()
                first.drop(resumable=True)
                feed(request, said[dropped_at : dropped_at + meanwhile])
                second = table.session()
                later: list[Any] = []
                if direct:
                    second.direct(SimpleNamespace(push=later.append))
                second.receive(resume(first, {"g": seen - 1}))
                feed(request, said[dropped_at + meanwhile :])
                answer, *rest = (*drained(second), *later)
                assert answer == m.Resumed(["g"])
                assert [str(x) for x in got[:seen] + rest] == [
                    str(x).replace(whole[0].id, request.id) for x in whole
                ]
                second.receive(m.Ack("g", 7))
                second.drop(resumable=True)
        assert len(table.service.shelf) == 1  # the undisturbed one's

    run(work)


def test_only_resumable_generations_outlive_a_drop() -> None:
    async def work(table: Table) -> None:
        session = table.session()
        kept = await table.begin(session, "kept")
        gone = await table.begin(session, "gone", resumable=False)
        session.drop(resumable=True)
        assert table.link.cancelled == [gone.id]
        session.drop(resumable=True)
        again = table.session()
        again.receive(resume(session, {"kept": -1, "gone": -1}))
        answer, error = again.take()
        assert answer == m.Resumed(["kept"])
        assert isinstance(error, m.Error) and (error.code, error.gen) == ("resume_gap", "gone")
        feed(kept, events(kept, 0))
        assert [type(x) for x in drained(again)] == [m.Started, m.Finished]

    run(work)


def test_who_leaves_on_purpose_ends_everything() -> None:
    async def work(table: Table) -> None:
        session = table.session()
        request = await table.begin(session)
        session.drop(resumable=False)
        assert table.link.cancelled == [request.id]
        assert len(table.service.shelf) == 0 and table.service.shelf.bytes == 0
        again = table.session()
        again.receive(resume(session, {"g": -1}))
        answer, error = again.take()
        assert answer == m.Resumed([]) and isinstance(error, m.Error)
        assert error.code == "resume_gap" and error.gen == "g"

    run(work)


def test_a_token_is_good_for_its_principal_only() -> None:
    async def work(table: Table) -> None:
        session = table.session(Principal("mine"))
        await table.begin(session)
        session.drop(resumable=True)
        for principal in (LOCAL, Principal("yours"), Principal("mine", admin=True)):
            other = table.session(principal)
            other.receive(resume(session, {"g": -1}))
            assert other.take()[0] == m.Resumed([])
        assert table.link.cancelled == []
        own = table.session(Principal("mine"))
        own.receive(resume(session, {"g": -1}))
        assert own.take()[0] == m.Resumed(["g"])

    run(work)


def test_a_second_connection_takes_over_from_one_that_still_stands() -> None:
    async def work(table: Table) -> None:
        first, second = table.session(), table.session()
        request = await table.begin(first)
        other = await table.begin(first, "other")
        said = events(request)
        feed(request, said[:3])
        second.receive(resume(first, {"g": 0}))
        assert table.closed == [module.MOVED]
        feed(request, said[3:])
        answer, *rest = drained(second)
        assert answer == m.Resumed(["g"]) and [x.seq for x in rest] == list(range(1, 8))
        # What it did not ask for stays to be asked for.
        third = table.session()
        third.receive(resume(first, {"other": -1}))
        assert third.take()[0] == m.Resumed(["other"])
        assert other.id not in table.link.cancelled and drained(first) == []

    run(work)


def test_a_request_still_being_read_moves_too() -> None:
    async def work(table: Table) -> None:
        first, second = table.session(), table.session()
        first.receive(m.generate({"gen": "g", "prompt": "x", "resumable": True}))
        first.drop(resumable=True)
        second.receive(resume(first, {"g": -1}))
        assert second.take() == [m.Resumed(["g"])]
        await asyncio.sleep(0.01)
        (request,) = table.link.requests
        feed(request, events(request))
        assert [x.seq for x in drained(second)] == list(range(8))

    run(work)


def test_what_was_acknowledged_is_not_kept() -> None:
    async def work(table: Table) -> None:
        session = table.session()
        request = await table.begin(session)
        feed(request, events(request))
        drained(session)
        held = table.service.shelf.bytes
        session.receive(m.Ack("g", 5))
        assert 0 < table.service.shelf.bytes < held
        session.receive(m.Ack("nothing of this name", 5))
        session.receive(m.Ack("g", 2**62))
        assert table.service.shelf.bytes == 0
        session.drop(resumable=True)
        assert len(table.service.shelf) == 0

    run(work)


def test_claims_beyond_what_was_sent_are_gaps() -> None:
    async def work(table: Table) -> None:
        first, second = table.session(), table.session()
        request = await table.begin(first)
        feed(request, events(request)[:3])
        first.drop(resumable=True)
        second.receive(resume(first, {"g": 3}))
        answer, error = second.take()
        assert answer == m.Resumed([]) and isinstance(error, m.Error)
        assert error.code == "resume_gap" and table.link.cancelled == [request.id]

    run(work)


def test_only_so_much_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shelf, "MAX_KEPT", 2000)

    async def work(table: Table) -> None:
        # Connected: the oldest go, the generation does not care.
        session, again = table.session(), table.session()
        request = await table.begin(session)
        feed(request, events(request, 40)[:-1])
        sent = drained(session)
        assert table.service.shelf.bytes <= 2000 and not table.link.cancelled
        session.drop(resumable=True)
        again.receive(resume(session, {"g": sent[-1].seq - 3}))
        assert [x.seq for x in again.take()[1:]] == [x.seq for x in sent[-3:]]  # type: ignore
        # Dropped, with messages gone that nobody can have: there is nothing to wait for.
        again.drop(resumable=True)
        feed(request, events(request, 40)[1:-1])
        assert table.link.cancelled == [request.id]
        assert len(table.service.shelf) == 0 and table.service.shelf.bytes == 0

    run(work)


def test_nobody_who_comes_back_within_the_window_ends_it() -> None:
    async def work(table: Table) -> None:
        table.service.shelf.window_s = 0.05
        first = table.session()
        request = await table.begin(first)
        first.drop(resumable=True)
        assert table.service.shelf.dropped == 1
        await asyncio.sleep(0.12)
        assert table.link.cancelled == [request.id]
        feed(request, events(request)[-1:])
        assert len(table.service.shelf) == 0 and not first.busy

    run(work)


def test_without_a_window_nothing_is_resumable() -> None:
    async def work(table: Table) -> None:
        table.service.shelf.window_s = 0.0
        session = table.session()
        session.greet()
        (hello,) = session.take()
        assert isinstance(hello, m.Hello) and hello.resume_token == ""
        request = await table.begin(session)
        session.drop(resumable=True)
        assert table.link.cancelled == [request.id] and len(table.service.shelf) == 0

    run(work)


def test_ended_generations_wait_to_be_resumed_but_not_too_many() -> None:
    async def work(table: Table) -> None:
        session = table.session()
        for i in range(module.MAX_OVER + 5):
            request = await table.begin(session, f"g{i}")
            feed(request, events(request, 1))
            drained(session)
        session.drop(resumable=True)
        again = table.session()
        again.receive(resume(session, {f"g{i}": 1 for i in (0, 4, 5, module.MAX_OVER + 4)}))
        answer, *rest = drained(again)
        assert answer.gens == ["g5", f"g{module.MAX_OVER + 4}"]
        assert [x.gen for x in rest if isinstance(x, m.Error)] == ["g0", "g4"]
        assert [type(x) for x in rest[2:]] == [m.Finished, m.Finished]

    run(work)


def test_a_name_that_runs_here_is_not_taken_over() -> None:
    async def work(table: Table) -> None:
        first, second = table.session(), table.session()
        await table.begin(first)
        mine = await table.begin(second)
        first.drop(resumable=True)
        second.receive(resume(first, {"g": -1}))
        answer, error = second.take()
        assert answer == m.Resumed([]) and isinstance(error, m.Error)
        assert (error.code, error.gen, error.param) == ("duplicate_id", None, "gens")
        feed(mine, events(mine))
        assert [x.seq for x in drained(second)] == list(range(8))

    run(work)


def test_a_cancel_at_every_number(monkeypatch: pytest.MonkeyPatch) -> None:
    async def work(table: Table) -> None:
        for at in range(8):
            session = table.session()
            request = await table.begin(session, resumable=bool(at % 2))
            said = events(request)
            feed(request, said[:at])
            session.receive(m.Cancel("g"))
            session.receive(m.Cancel("g"))
            assert set(table.link.cancelled) == {request.id}
            usage, timings = Usage(1, 0, at), RequestTimings(1, 2, 3, 4)
            feed(request, [Finished(request, 0, "cancelled", None, usage, timings), *said[at:]])
            got = drained(session)
            assert [x.seq for x in got] == list(range(at + 1))
            assert got[-1].reason == "cancelled" and not session.busy
            table.link.cancelled.clear()
            session.drop(resumable=False)

    run(work)


def test_cancelled_before_it_began_and_named_again() -> None:
    async def work(table: Table) -> None:
        session = table.session()
        for _ in range(2):
            session.receive(m.generate({"gen": "g", "prompt": "x"}))
            session.receive(m.Cancel("g"))
        session.receive(m.generate({"gen": "g", "prompt": "x"}))
        await asyncio.sleep(0.01)
        assert [x.reason for x in drained(session)] == ["cancelled", "cancelled"]  # type: ignore
        assert len(table.link.requests) == 1  # the last one only

    run(work)


def test_an_engine_that_is_gone_ends_generations_and_no_session() -> None:
    async def work(table: Table) -> None:
        session = table.session()
        request = await table.begin(session)
        lost = RequestError("", "the engine stopped", "engine_error")
        lost.retry_after_ms = 1000
        nothing = Usage(0, 0, 0), RequestTimings(0, 0, 0, 0)
        feed(request, [Finished(request, 0, "error", None, *nothing, lost)])
        (error,) = drained(session)
        assert (error.code, error.retryable, error.seq) == ("engine_error", True, 0)
        table.link.refuse = lost
        session.receive(m.generate({"gen": "h", "prompt": "x"}))
        await asyncio.sleep(0.01)
        (error,) = drained(session)
        assert (error.code, error.gen) == ("engine_error", "h")
        table.link.refuse = None
        request = await table.begin(session)
        feed(request, events(request))
        assert len(drained(session)) == 8

    run(work)


def test_replays_come_in_pieces_and_before_what_is_new() -> None:
    async def work(table: Table) -> None:
        first, second = table.session(), table.session()
        request = await table.begin(first)
        said = events(request, 200)
        feed(request, said[:150])
        first.drop(resumable=True)
        feed(request, said[150:190])
        second.receive(resume(first, {"g": -1}))
        feed(request, said[190:])
        seqs, sizes = [], []
        while second.waiting:
            taken = second.take()
            sizes.append(len(taken))
            seqs += [x.seq for x in taken if not isinstance(x, m.Resumed)]  # type: ignore
        assert seqs == list(range(len(seqs))) and max(sizes) <= 2 * module.REPLAY

    run(work)
