"""A browser and a page server for tests of the chat page, and the few things they all do.

Chromium comes from the system; nothing is downloaded. Whatever a page asks of any other host than
its server, and whatever it says in the console, is kept and checked when the test is over.
"""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from playwright.sync_api import Browser, BrowserContext, Page, expect, sync_playwright

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_START = (
    "import sys, types; tests = types.ModuleType('tests'); "
    f"tests.__path__ = [{str(ROOT / 'tests')!r}]; sys.modules['tests'] = tests; "
    "from tests.web.page_server import main; sys.exit(main())"
)
WAIT_MS = 60_000  # a bound for a crowded machine, not a measure
expect.set_options(timeout=WAIT_MS)


class PageServer:
    """A server process that can be stopped and started again on the same port."""

    def __init__(self, engine: dict[str, Any], settings: dict[str, Any]) -> None:
        self._engine, self._settings = engine, settings
        self.port = 0
        self.process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/"

    def start(self) -> None:
        command = [
            sys.executable, "-P", "-W", "error", "-c", _START,
            json.dumps(self._settings | {"port": self.port}), json.dumps(self._engine),
        ]  # fmt: skip
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )
        assert self.process.stdout is not None and self.process.stderr is not None
        line = self.process.stdout.readline()
        if not line:
            _, said = self.process.communicate()
            raise AssertionError(said)
        self.port = int(re.findall(r":(\d+)/", line)[0])

    def kill(self) -> None:
        """End at once, as a crash does."""
        if self.process is not None:
            self.process.kill()
            self.process.communicate()
            self.process = None


@contextmanager
def page_server(engine: dict[str, Any] | None = None, **settings: Any) -> Iterator[PageServer]:
    server = PageServer(engine or {}, settings)
    with socket.socket() as held:
        # Bound here too and never listened on: while the server is down nobody gets its port.
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        held.bind(("127.0.0.1", 0))
        server.port = held.getsockname()[1]
        try:
            server.start()
            yield server
        finally:
            server.kill()


@contextmanager
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        made = playwright.chromium.launch(
            executable_path=CHROMIUM,
            timeout=2 * WAIT_MS,
            args=[
                "--no-sandbox", "--disable-gpu", "--host-resolver-rules=MAP page.test 127.0.0.1",
            ],
        )
        try:
            yield made
        finally:
            made.close()


class Reader:
    """Somebody with a browser of their own in front of a server's page."""

    def __init__(
        self, context: BrowserContext, server: PageServer, host: str = "127.0.0.1"
    ) -> None:
        self.context, self.server = context, server
        self._host = host
        self.foreign: list[str] = []
        self.complaints: list[str] = []
        context.route(re.compile(".*"), self._route)
        context.set_default_timeout(WAIT_MS)

    @property
    def url(self) -> str:
        return self.server.url.replace("127.0.0.1", self._host)

    def _route(self, route: Any) -> None:
        url = route.request.url
        if url.startswith((self.url, "data:")):
            route.continue_()
        else:
            self.foreign.append(url)
            route.abort()

    def open(self) -> Page:
        """A new tab with the page, connected."""
        page = self.context.new_page()
        page.on("pageerror", lambda error: self.complaints.append(str(error)))
        page.on("console", self._console)
        page.goto(self.url)
        return page

    def _console(self, message: Any) -> None:
        # A server that is down or wants a key shows as failed requests; other tests look at that.
        if message.type in ("error", "warning") and not re.search(
            r"WebSocket connection|ERR_CONNECTION|status of 401", message.text
        ):
            self.complaints.append(message.text)


def say(page: Page, text: str) -> None:
    """Type a message and send it by Enter."""
    page.locator("#input").fill(text)
    page.locator("#input").press("Enter")


def answers(page: Page) -> Any:
    return page.locator(".message.assistant")


def done(page: Page, count: int = 1) -> None:
    """Wait until so many answers stand there and none is being written."""
    expect(answers(page)).to_have_count(count, timeout=WAIT_MS)
    expect(page.locator(".message[data-state='writing']")).to_have_count(0, timeout=WAIT_MS)
    expect(page.locator("#stop")).to_be_hidden(timeout=WAIT_MS)


@contextmanager
def anew(page: Page, at: int = 0) -> Iterator[None]:
    """Around what asks for an answer anew: ends once the old one at this place is gone.

    Until then it still counts as an answer that stands there.
    """
    old = answers(page).nth(at).element_handle()
    yield
    old.wait_for_element_state("hidden", timeout=WAIT_MS)


def holds(page: Page, expression: str) -> None:
    """Wait until it does. The page's policy bars what wait_for_function would do there."""
    for _ in range(WAIT_MS // 50):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"still not: {expression}")


def stored(page: Page) -> Any:
    """All messages in the browser's store, as [chat, at, role, state, text]."""
    return page.evaluate(
        """() => new Promise((resolve, reject) => {
          const opening = indexedDB.open("specserve");
          opening.onerror = () => reject(opening.error);
          opening.onsuccess = () => {
            const asking = opening.result.transaction("messages").objectStore("messages").getAll();
            asking.onsuccess = () => { opening.result.close(); resolve(
              asking.result.map((m) => [m.chat, m.at, m.role, m.state, m.text])); };
          };
        })"""
    )


def kept(page: Page) -> None:
    """Wait until the browser's store holds all that was answered, before the page is left."""
    for _ in range(WAIT_MS // 50):
        held = stored(page)
        if held and all(state != "writing" for *_, state, _text in held):
            return
        page.wait_for_timeout(50)
    raise AssertionError(f"still unsaved: {stored(page)}")
