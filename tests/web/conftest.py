"""Browsers, servers and readers for the tests of the chat page, shared by its test modules."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Browser

from tests.web.browser import CHROMIUM, PageServer, Reader, browser, page_server


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no Chromium on this machine")
    with browser() as made:
        yield made


@pytest.fixture(scope="module")
def server() -> Iterator[PageServer]:
    """Quick: five tokens every 5 ms."""
    with page_server({"run": 5, "pause": 0.005, "context": 60_000}) as made:
        yield made


@pytest.fixture(scope="module")
def slow() -> Iterator[PageServer]:
    """Slow enough to do something meanwhile: four tokens every 40 ms."""
    with page_server({"run": 4, "pause": 0.04, "context": 60_000}) as made:
        yield made


def reading(chromium: Browser, server: PageServer, **context: object) -> Iterator[Reader]:
    """A reader whose page neither asks anybody else nor complains."""
    made = Reader(chromium.new_context(**context), server)  # type: ignore[arg-type]
    yield made
    made.context.close()
    assert made.foreign == []
    assert made.complaints == []


@pytest.fixture
def reader(chromium: Browser, server: PageServer) -> Iterator[Reader]:
    yield from reading(chromium, server)


@pytest.fixture
def patient(chromium: Browser, slow: PageServer) -> Iterator[Reader]:
    yield from reading(chromium, slow)


@pytest.fixture
def phone(chromium: Browser, server: PageServer) -> Iterator[Reader]:
    """360 pixels wide, dark, touched."""
    size = {"width": 360, "height": 740}
    yield from reading(chromium, server, viewport=size, has_touch=True, color_scheme="dark")
