"""The chat page in a real browser: talking, stopping, editing, coming back.

The model is an engine that says what it was told, so that a test decides what the page gets. Needs
Chromium; the page's own requests never leave the machine.
"""

from __future__ import annotations

import re

import pytest
from playwright.sync_api import expect

from tests.web.browser import Reader, anew, answers, done, kept, say, stored
from tests.web.texts import long_text


def test_a_message_is_answered(reader: Reader) -> None:
    page = reader.open()
    expect(page.locator("#model")).to_have_text("echo")
    say(page, "Say **this** and `that`.\n\n- one\n- two")
    done(page)
    body = answers(page).locator(".body")
    expect(body.locator("strong")).to_have_text("this")
    expect(body.locator("li")).to_have_text(["one", "two"])
    expect(page.locator(".message.user .body")).to_contain_text("**this**")
    strip = page.locator("#strip")
    expect(strip).to_contain_text("tokens per step")
    expect(strip).to_contain_text("without speculation (estimate)")
    expect(page.locator("#legend")).to_contain_text("This conversation")
    assert page.title() == "Say this and that. - one - two · spec-serve"
    expect(page.locator("#input")).to_be_focused()


def test_code_is_coloured_and_copied(reader: Reader) -> None:
    reader.context.grant_permissions(["clipboard-read", "clipboard-write"])
    page = reader.open()
    say(page, "```python\ndef f():\n    return 1\n```\n\nDone.")
    done(page)
    expect(page.locator(".hljs-keyword").first).to_have_text("def")
    page.locator(".copy-code").click()
    expect(page.locator(".copy-code")).to_have_text("Copied")
    assert page.evaluate("navigator.clipboard.readText()") == "def f():\n    return 1"


def test_text_streams_and_guesses_show(patient: Reader) -> None:
    page = patient.open()
    page.evaluate(
        """() => {
          window.seen = { ghosts: new Set(), growth: new Set(), hot: 0 };
          new MutationObserver(() => {
            const ghost = document.querySelector(".ghost");
            if (ghost) seen.ghosts.add(ghost.textContent);
            const body = document.querySelector(".message.assistant .body");
            if (body) seen.growth.add(body.textContent.length);
            seen.hot = Math.max(seen.hot, CSS.highlights.get("hot-1")?.size ?? 0);
          }).observe(document.querySelector("#log"), { childList: true, subtree: true });
        }"""
    )
    # Long enough for a browser that is short of time to draw it more than once or twice.
    say(page, "A sentence that takes a while to come out, so that it can be watched at work. " * 3)
    expect(page.locator("#tree svg")).to_have_attribute("aria-label", re.compile("guessed"))
    expect(page.locator("#tree .node.taken.slot-1").first).to_be_attached()
    expect(page.locator("#tree .node.left").first).to_be_attached()
    done(page)
    seen = page.evaluate("({ ghosts: [...seen.ghosts], growth: [...seen.growth], hot: seen.hot })")
    assert seen["ghosts"] == ["xy"]  # the first rejected guess and the one behind it
    assert len(seen["growth"]) >= 4
    assert seen["hot"] >= 1
    expect(page.locator(".ghost")).to_have_count(0)
    colours = page.evaluate(
        "[1, 2].map((n) => ['source', 'hot'].flatMap((k) => [...CSS.highlights.get(`${k}-${n}`)])"
        ".map((r) => r.startContainer.data.slice(r.startOffset, r.endOffset)).join(''))"
    )
    # Of four tokens one came from the first source, two from the second, and one is the model's.
    assert [len(text) for text in colours] == pytest.approx([60, 100], abs=24)
    expect(page.locator("#strip [data-key='per-step'] dd")).to_have_text(re.compile("^3.9|^4.0"))


def test_stop_keeps_what_came(patient: Reader) -> None:
    page = patient.open()
    say(page, "long 9900")
    expect(answers(page)).to_contain_text("quick brown")
    page.locator("#input").press("Escape")
    done(page)
    expect(answers(page)).to_contain_text("Stopped.")
    kept = answers(page).locator(".body").inner_text()
    assert 0 < len(kept) < 9900
    expect(page.get_by_role("button", name="Continue")).to_be_visible()
    say(page, "long 9900")
    page.get_by_role("button", name="Stop", exact=True).click()
    done(page, 2)


def test_regenerate_and_edit(reader: Reader) -> None:
    page = reader.open()
    say(page, "first")
    done(page)
    say(page, "second")
    done(page, 2)
    before = stored(page)
    with anew(page, 1):
        answers(page).nth(1).get_by_role("button", name="Regenerate").click()
    done(page, 2)
    expect(answers(page).nth(1).locator(".body")).to_have_text("second")
    assert [row[1:] for row in stored(page)] == [row[1:] for row in before]
    page.locator(".message.user").first.hover()
    page.locator(".message.user").first.get_by_role("button", name="Edit").click()
    field = page.get_by_label("Edit your message")
    expect(field).to_be_focused()
    field.fill("changed")
    field.press("Enter")
    done(page, 1)
    expect(page.locator(".message .body")).to_have_text(["changed", "changed"])
    assert [row[2:] for row in stored(page)] == [
        ["user", "done", "changed"], ["assistant", "done", "changed"],
    ]  # fmt: skip


def test_earlier_turns_and_the_system_prompt_are_sent(reader: Reader) -> None:
    page = reader.open()
    page.get_by_role("button", name="Settings").click()
    page.get_by_label("System prompt of this conversation").fill("Be brief.")
    page.get_by_label("Temperature").fill("0.5")
    page.get_by_role("button", name="Save").click()
    say(page, "one")
    done(page)
    say(page, "history?")
    done(page, 2)
    expect(answers(page).nth(1).locator(".body")).to_have_text(
        "system: Be brief.; user: one; assistant: one; user: history?"
    )
    kept(page)
    page.reload()
    page.get_by_role("button", name="Settings").click()
    expect(page.get_by_label("System prompt of this conversation")).to_have_value("Be brief.")
    expect(page.get_by_label("Temperature")).to_have_value("0.5")


def test_conversations_are_kept_renamed_and_deleted(reader: Reader) -> None:
    page = reader.open()
    say(page, "the first one")
    done(page)
    page.get_by_role("button", name="New conversation").click()
    expect(page.locator(".message")).to_have_count(0)
    say(page, "the second one")
    done(page)
    kept(page)
    page.reload()
    expect(page.locator(".message .body")).to_have_text(["the second one", "the second one"])
    page.locator(".chat-name", has_text="the first one").click()
    expect(page.locator(".message .body")).to_have_text(["the first one", "the first one"])
    page.get_by_role("button", name="Rename the first one").click()
    page.get_by_role("textbox", name="Name").fill("Renamed")
    page.get_by_role("button", name="Rename", exact=True).click()
    expect(page.locator("#title")).to_have_text("Renamed")
    page.get_by_role("button", name="Delete Renamed").click()
    page.get_by_role("button", name="Delete", exact=True).click()
    expect(page.locator(".chat-name")).to_have_text(["the second one"])
    expect(page.locator(".message")).to_have_count(0)
    assert len(stored(page)) == 2


def test_a_reload_in_the_middle_goes_on(patient: Reader) -> None:
    page = patient.open()
    say(page, "long 160")
    expect(answers(page)).to_contain_text("quick brown")
    stored(page)  # comes after what the page is storing: whom to ask for the rest
    page.reload()
    done(page)
    text = stored(page)[1]
    assert text[3] == "done"
    assert text[4] == long_text(160)
