"""What the chat page is to everybody: names, keyboard, themes, contrast, calm, settings.

In a real browser; see `test_page.py`.
"""

from __future__ import annotations

from typing import Any

from playwright.sync_api import Page, expect

from tests.web.browser import Reader, anew, answers, done, holds, say, stored

UNNAMED = """() => [..."button, input, textarea, select, a, dialog, nav, aside".split(", ")]
  .flatMap((kind) => [...document.querySelectorAll(kind)])
  .filter((e) => {
    const by = e.getAttribute("aria-labelledby");
    const name = e.getAttribute("aria-label") || (by && document.getElementById(by)?.textContent)
      || [...(e.labels ?? [])].map((l) => l.textContent).join("") || e.textContent;
    return !name.trim();
  }).map((e) => e.outerHTML)"""
CONTRAST = """() => {
  const rgb = (text) => {
    const probe = document.createElement("canvas").getContext("2d");
    probe.fillStyle = text;
    probe.fillRect(0, 0, 1, 1);
    return [...probe.getImageData(0, 0, 1, 1).data].slice(0, 3).map((v) => {
      v /= 255;
      return v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
    });
  };
  const light = (text) => {
    const [r, g, b] = rgb(text);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const probe = document.createElement("i");
  document.body.append(probe);
  const value = (name) => {
    probe.style.color = `var(--${name})`;
    return getComputedStyle(probe).color;
  };
  const pairs = [["text", "bg"], ["text", "raised"], ["text", "accent-soft"], ["soft", "bg"],
    ["soft", "sunken"], ["accent", "bg"], ["accent-text", "accent"], ["bad", "bg"],
    ["bad", "raised"]];
  const found = pairs.map(([a, b]) => {
    const [x, y] = [light(value(a)), light(value(b))].sort((p, q) => q - p);
    return [`${a} on ${b}`, (x + 0.05) / (y + 0.05)];
  });
  probe.remove();
  return found;
}"""


def focused(page: Page) -> str:
    return str(page.evaluate("document.activeElement.id || document.activeElement.textContent"))


def test_everything_has_a_name(reader: Reader) -> None:
    page = reader.open()
    say(page, "**hi** there\n\n```js\n1\n```\n\n|a|b|\n|---|---|\n|1|2|")
    done(page)
    assert page.evaluate(UNNAMED) == []
    log = page.get_by_role("log", name="Messages")
    expect(log).to_have_attribute("aria-live", "polite")
    expect(log.get_by_role("article", name="You")).to_have_count(1)
    expect(log.get_by_role("article", name="Answer")).to_have_count(1)
    expect(page.get_by_role("textbox", name="Message")).to_be_visible()
    expect(page.get_by_role("navigation", name="Conversations")).to_be_visible()
    expect(page.get_by_role("complementary", name="Speculation")).to_be_visible()
    expect(page.locator("html")).to_have_attribute("lang", "en")
    levels = page.evaluate(
        "[...document.querySelectorAll('h1, h2')].filter((h) => h.checkVisibility())"
        ".map((h) => h.tagName)"
    )
    assert levels.count("H1") == 1


def test_a_screen_reader_hears_paragraphs_and_not_tokens(patient: Reader) -> None:
    page = patient.open()
    say(page, "long 9900")
    article = page.locator(".message.assistant")
    expect(article).to_have_attribute("aria-busy", "true")
    # What still changes is silent; what is added to the log is finished.
    expect(article.locator(".tail")).to_have_attribute("aria-live", "off")
    page.keyboard.press("Escape")
    done(page)
    expect(article).not_to_have_attribute("aria-busy", "true")


def test_the_keyboard_reaches_everything_in_order(reader: Reader) -> None:
    page = reader.open()
    expect(page.locator("#input")).to_be_focused()
    order = []
    while "Skip to the message box" not in order or len(order) < 12:
        page.keyboard.press("Tab")
        order.append(focused(page))
    start = order.index("Skip to the message box")
    assert order[start : start + 7] == [
        "Skip to the message box", "new-chat", "theme", "open-settings", "toggle-panel",
        "input", "close-panel",
    ]  # fmt: skip
    while focused(page) != "new-chat":
        page.keyboard.press("Tab")
    ring = page.evaluate("getComputedStyle(document.activeElement).outlineStyle")
    assert ring == "solid"
    page.locator("#open-settings").focus()
    page.keyboard.press("Enter")
    dialog = page.get_by_role("dialog", name="Settings")
    expect(dialog).to_be_visible()
    for _ in range(30):  # focus stays inside
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.matches('body, dialog, dialog *')")
    page.keyboard.press("Escape")
    expect(dialog).to_be_hidden()
    expect(page.locator("#open-settings")).to_be_focused()


def test_enter_sends_and_shift_enter_starts_a_line(reader: Reader) -> None:
    page = reader.open()
    box = page.locator("#input")
    box.press("Enter")
    expect(page.locator(".message")).to_have_count(0)
    box.press_sequentially("one")
    box.press("Shift+Enter")
    box.press_sequentially("two")
    assert box.bounding_box()["height"] > 50  # type: ignore[index]
    box.press("Enter")
    done(page)
    assert page.locator(".message.user .body").text_content() == "one\ntwo"
    expect(box).to_have_value("")


def test_what_is_sent_too_soon_stays_in_the_box(reader: Reader) -> None:
    page = reader.open()
    expect(page.locator("#model")).to_have_text("echo")
    box = page.locator("#input")
    page.evaluate(  # the second before the browser has stored the first
        """() => {
          const box = document.querySelector("#input"), form = document.querySelector("#composer");
          for (const text of ["one", "two"]) { box.value = text; form.requestSubmit(); }
        }"""
    )
    done(page)
    expect(box).to_have_value("two")
    box.press("Enter")
    done(page, 2)
    assert [row[4] for row in stored(page)] == ["one", "one", "two", "two"]


def test_what_is_typed_while_the_store_opens_is_not_sent_by_an_earlier_enter(
    reader: Reader,
) -> None:
    page = reader.context.new_page()
    page.add_init_script(
        """Object.defineProperty(IDBOpenDBRequest.prototype, "onsuccess", { set(told) {
          this.addEventListener("success", () => 
            setTimeout(() => { told(); setTimeout(() => { window.opened = true; }, 200); }, 1000));
        } });"""
    )
    page.goto(reader.server.url)
    box = page.locator("#input")
    box.press("Enter")
    box.press_sequentially("one")
    expect(page.locator("#model")).to_have_text("echo")
    holds(page, "window.opened")
    expect(page.locator(".message")).to_have_count(0)
    box.press("Enter")
    box.press_sequentially("two")
    done(page)
    assert [row[4] for row in stored(page)] == ["one", "one"]
    expect(box).to_have_value("two")


def test_themes_follow_the_system_or_the_switch(reader: Reader) -> None:
    page = reader.open()
    shade = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(shade)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(shade)
    assert light != dark
    switch = page.locator("#theme")
    switch.click()
    expect(switch).to_have_text("Theme: light")
    assert page.evaluate(shade) == light
    switch.click()
    page.emulate_media(color_scheme="light")
    page.reload()
    expect(switch).to_have_text("Theme: dark")
    assert page.evaluate(shade) == dark


def test_colours_can_be_read(reader: Reader) -> None:
    page = reader.open()
    for scheme in ("light", "dark"):
        page.emulate_media(color_scheme=scheme)  # type: ignore[arg-type]
        found: list[list[Any]] = page.evaluate(CONTRAST)
        assert [(scheme, name, ratio) for name, ratio in found if ratio < 4.5] == []


def test_reduced_motion_shows_no_flicker(patient: Reader) -> None:
    page = patient.open()
    page.emulate_media(reduced_motion="reduce")
    page.evaluate(
        """() => {
          window.ghosts = 0;
          const count = () => { ghosts += document.querySelectorAll(".ghost").length; };
          const log = document.querySelector("#log");
          new MutationObserver(count).observe(log, { childList: true, subtree: true });
        }"""
    )
    say(page, "a few words that are streamed")
    done(page)
    assert page.evaluate("ghosts") == 0


def test_settings_reach_the_server(reader: Reader) -> None:
    sent: list[str] = []
    page = reader.context.new_page()
    page.on("websocket", lambda socket: socket.on("framesent", lambda data: sent.append(str(data))))
    page.goto(reader.server.url)
    page.get_by_role("button", name="Settings").click()
    for name, value in {
        "Temperature": "0.7", "Top-p": "0.9", "Top-k": "40", "Min-p": "0.05",
        "Longest answer (tokens)": "7", "Seed": "42", "Presence penalty": "0.5",
        "Frequency penalty": "-0.5", "Repetition penalty": "1.1",
    }.items():  # fmt: skip
        page.get_by_label(name).fill(value)
    page.get_by_text("Off", exact=True).click()
    page.get_by_role("button", name="Save").click()
    say(page, "a longer message")
    done(page)
    expect(answers(page).locator(".body")).to_have_text("a longe")
    expect(answers(page)).to_contain_text("The longest answer was reached.")
    request = next(frame for frame in sent if '"generate"' in frame)
    for part in (
        '"temperature":0.7', '"top_p":0.9', '"top_k":40', '"min_p":0.05', '"max_tokens":7',
        '"seed":42', '"presence_penalty":0.5', '"frequency_penalty":-0.5',
        '"repetition_penalty":1.1', '"mode":"off"', '"resumable":true', '"steps":"tokens"',
    ):  # fmt: skip
        assert part in request, part


def test_a_refused_request_says_why_and_can_be_tried_again(reader: Reader) -> None:
    page = reader.open()
    say(page, "refuse this")
    error = page.locator(".note.error")
    expect(error).to_contain_text("the template refuses it")
    with anew(page):
        page.get_by_role("button", name="Try again").click()
    done(page)
    expect(error).to_contain_text("the template refuses it")
    say(page, "better")
    done(page, 2)
    expect(answers(page).nth(1).locator(".body")).to_have_text("better")
