"""What transports share: long texts are read beside the loop, those far too long not at all."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from spec_serve.api import messages as m
from spec_serve.api import service as module
from spec_serve.api.link import ThreadLink
from spec_serve.api.service import Service, shown_name
from spec_serve.spec.request import RequestError
from tests.api.echo import ByteTokens, Echo


class Noted(ByteTokens):
    """Notes which thread reads texts; `gate` holds the reading of chats up."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[int] = []
        self.gate = threading.Event()
        self.gate.set()

    def encode(self, text: str, **kwargs: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        return super().encode(text, **kwargs)

    def render_chat(self, messages: list[dict[str, Any]], **kwargs: Any) -> list[int]:
        self.threads.append(threading.get_ident())
        assert self.gate.wait(10)
        return super().render_chat(messages, **kwargs)


@pytest.fixture
def noted() -> Noted:
    return Noted()


class Alive(ThreadLink):
    """Never started: preparing needs no engine that steps."""

    alive = True


@pytest.fixture
def service(noted: Noted) -> Iterator[Service]:
    made = Service(Alive(Echo()), noted, "echo")
    yield made
    noted.gate.set()
    made.close()


def chat(text: str, **fields: Any) -> m.Generate:
    return m.Generate("g", messages=[m.ChatMessage("user", text, **fields)])


def prepare(service: Service, *wires: m.Generate) -> list[Any]:
    async def go() -> list[Any]:
        made = map(service.prepare, wires)
        return list(await asyncio.gather(*made, return_exceptions=True))

    return asyncio.run(go())


def test_short_texts_are_read_on_the_loop_and_long_ones_beside_it(
    service: Service, noted: Noted
) -> None:
    here = threading.get_ident()
    (short,) = prepare(service, m.Generate("g", prompt="x" * 10))
    assert short.request.prompt == list(b"x" * 10) and noted.threads == [here]
    (long,) = prepare(service, m.Generate("g", prompt="x" * (module.INLINE_CHARS + 1)))
    assert long.request.prompt and len(noted.threads) == 2 and noted.threads[1] != here
    (long,) = prepare(service, m.Generate("g", prompt="x" * (service.link.info.max_context + 1)))
    assert isinstance(long, RequestError) and long.code == "context_length_exceeded"
    assert "tokens" in str(long) and len(noted.threads) == 3
    prepare(service, chat("x"))
    assert here not in noted.threads[1:]


CONTEXT = Echo().info.max_context
FAR = module.MOST_CHARS_PER_TOKEN * CONTEXT + 1
TOO_LONG: list[tuple[str, m.Generate]] = [
    ("prompt", m.Generate("g", prompt="x" * FAR)),
    ("messages", chat("x" * FAR)),
    ("messages", m.Generate("g", messages=[m.ChatMessage("user", "x" * (FAR // 2 + 1))] * 2)),
    ("messages", m.Generate("g", messages=[
        m.ChatMessage("user", [{"type": "text", "text": "x" * FAR}])
    ])),
    ("messages", chat("x", tool_calls=[{"arguments": "x" * FAR}])),
    ("messages", m.Generate("g", messages=[m.ChatMessage("user", "x")], tools=[{"x": "y" * FAR}])),
]  # fmt: skip


@pytest.mark.parametrize(("field", "wire"), TOO_LONG)
def test_what_is_far_too_long_is_not_read(
    service: Service, noted: Noted, field: str, wire: m.Generate
) -> None:
    (error,) = prepare(service, wire)
    assert isinstance(error, RequestError)
    assert (error.code, error.field) == ("context_length_exceeded", field)
    assert str(FAR - 1) in str(error) and noted.threads == []


def test_reading_that_takes_too_long_is_given_up(
    service: Service, noted: Noted, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "PREPARE_S", 0.05)
    noted.gate.clear()
    errors = prepare(service, *[chat("x")] * 5)
    assert [error.code for error in errors] == ["timeout"] * 5
    assert len(noted.threads) == 2  # those still waiting were never begun
    noted.gate.set()
    monkeypatch.setattr(module, "PREPARE_S", 10.0)
    (made,) = prepare(service, chat("x"))
    assert made.request.prompt


def test_constraints_are_given_up_when_the_answer_is_due(
    service: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[float] = []

    class Slow:
        def begin(self, constraint: Any, until: float) -> Future[Any]:
            told.append(until)
            return Future()

        def reading(self, making: Future[Any]) -> bool:
            return False

    def due(arrived: float) -> float:
        told.append(arrived)
        return arrived  # now, that is

    monkeypatch.setattr(module, "compiler_of", lambda tokenizer: Slow())
    monkeypatch.setattr(module, "due", due)
    more = m.Segment([1], constraint=m.Constraint("regex", "b"))
    asked = m.Generate("g", prompt="x", constraint=m.Constraint("regex", "a"), segments=[more])
    (error,) = prepare(service, asked)
    assert isinstance(error, RequestError) and error.code == "overloaded"
    assert told == [told[0]] * 3  # both are due when the request says


def test_a_draining_service_takes_nothing(service: Service) -> None:
    service.draining = True
    (error,) = prepare(service, m.Generate("g", prompt="x"))
    assert error.code == "draining" and not service.ready


def test_clients_see_names_and_no_paths() -> None:
    assert shown_name("/models/some/name.gguf") == "name.gguf"
    assert shown_name("owner/name") == "owner/name"
