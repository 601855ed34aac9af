"""The chat page in front of the real engine: a tiny model that is its own draft.

What the page shows of speculation has to come from real steps, and the text must not depend on it.
See `test_page.py`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.servers import start
from tests.tiny import write_tiny_model_dir
from tests.web.browser import PageServer, Reader, anew, answers, done, say, stored


def choose(page: Page, mode: str) -> None:
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("Temperature").fill("0.8")
    page.get_by_label("Seed").fill("7")
    page.get_by_label("Longest answer (tokens)").fill("40")
    page.get_by_text(mode, exact=True).click()
    page.get_by_role("button", name="Save").click()


def test_real_guesses_are_shown_and_change_no_text(
    chromium: Browser, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder: Path = tmp_path_factory.mktemp("tiny")
    with start(write_tiny_model_dir(folder), folder / "server.log") as running:
        server = PageServer({}, {})
        server.port = int(running.health.rsplit(":", 1)[1].partition("/")[0])
        reader = Reader(chromium.new_context(), server)
        page = reader.open()
        expect(page.locator("#model")).to_have_text("tiny")
        choose(page, "As much as possible")
        say(page, "the other")
        done(page)
        text = stored(page)[1][4]
        assert len(text) > 10
        expect(page.locator("#legend")).to_contain_text("Draft model")
        expect(page.locator("#tree .node.slot-0").first).to_be_attached()
        per_step = float(page.locator("#strip [data-key='per-step'] dd").inner_text())
        assert per_step > 1.5  # the draft is the target: most guesses are right
        assert page.evaluate("['source-0', 'hot-0'].some((name) => CSS.highlights.get(name)?.size)")
        choose(page, "Off")
        with anew(page):
            page.get_by_role("button", name="Regenerate").click()
        expect(page.locator("#strip [data-key='per-step'] dd")).to_have_text("1.00")
        done(page)
        assert stored(page)[1][4] == text
        expect(page.locator("#legend")).to_have_text("No guesses yet.")
        assert answers(page).count() == 1
        reader.context.close()
        assert reader.foreign == [] and reader.complaints == []
