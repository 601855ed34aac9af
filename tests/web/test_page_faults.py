"""The chat page when things go wrong: drops, restarts, tabs, hostile text, keys, long histories.

In a real browser; see `test_page.py`.
"""

from __future__ import annotations

import json
import re
from typing import Any

from playwright.sync_api import Browser, Page, expect

from tests.web.browser import (
    PageServer,
    Reader,
    anew,
    answers,
    done,
    holds,
    kept,
    page_server,
    say,
    stored,
)
from tests.web.texts import long_text


def test_a_dropped_socket_is_taken_up_again(patient: Reader) -> None:
    sockets: list[Any] = []

    def between(ours: Any) -> None:
        sockets.append((ours, ours.connect_to_server()))

    patient.context.route_web_socket(re.compile(".*/v1/stream"), between)
    page = patient.open()
    say(page, "long 300")
    expect(answers(page)).to_contain_text("quick brown")
    ours, theirs = sockets[0]
    page.evaluate(
        """() => {
          const said = document.querySelector("#connection");
          window.told = [];
          const tell = () => told.push(said.textContent);
          new MutationObserver(tell).observe(said, { childList: true });
        }"""
    )
    ours.close(code=4001)  # first: what the page says to a closed one is complained of
    theirs.close(code=4001)
    holds(page, "told.some((text) => text)")
    expect(page.locator("#connection")).to_be_empty()
    done(page)
    assert len(sockets) == 2
    assert [row[2:] for row in stored(page)] == [
        ["user", "done", "long 300"], ["assistant", "done", long_text(300)],
    ]  # fmt: skip


def test_a_restarted_server_costs_no_text(chromium: Browser) -> None:
    with page_server({"run": 4, "pause": 0.02, "context": 60_000}) as server:
        reader = Reader(chromium.new_context(), server)
        sent: list[str] = []
        page = reader.context.new_page()
        page.on("websocket", lambda made: made.on("framesent", lambda data: sent.append(data)))
        page.goto(reader.url)
        say(page, "long 400")
        expect(answers(page)).to_contain_text("quick brown")
        server.kill()
        expect(page.locator("#connection")).to_contain_text("Connection lost")
        expect(page.locator(".why")).to_have_text("waiting for the server")
        assert "quick brown" in answers(page).inner_text()
        server.start()
        expect(answers(page)).to_contain_text("The rest was lost")
        expect(page.locator("#connection")).to_be_empty()
        with anew(page):
            page.get_by_role("button", name="Continue").click()
        done(page)
        assert stored(page)[1][3:] == ["done", long_text(400)]
        first, again = (json.loads(frame) for frame in sent if '"generate"' in frame)
        assert again["sampling"] == first["sampling"] and first["sampling"]["seed"] > 0
        assert again["speculation"]["prediction"].startswith("The quick brown")
        assert again["messages"] == first["messages"]
        # What is said while it is away is answered once it is back.
        server.kill()
        say(page, "are you there")
        expect(page.locator(".why")).to_have_text("waiting for the server")
        server.start()
        done(page, 2)
        expect(answers(page).nth(1).locator(".body")).to_have_text("are you there")
        reader.context.close()


def test_two_tabs_share_one_store(patient: Reader) -> None:
    one, two = patient.open(), patient.open()
    say(one, "from the first")
    done(one)
    two.locator(".chat-name").click()
    expect(two.locator(".message")).to_have_count(2)
    say(one, "long 9900")
    # The other tab sees the answer grow and may not write meanwhile.
    expect(answers(two).nth(1)).to_contain_text("quick brown")
    expect(two.locator("#input")).to_have_attribute("placeholder", re.compile("another tab"))
    two.locator("#input").fill("not now")
    expect(two.locator("#send")).to_be_disabled()
    one.locator("#input").press("Escape")
    done(one, 2)
    done(two, 2)
    expect(answers(two).nth(1)).to_contain_text("Stopped.")
    two.locator("#input").press("Enter")
    done(two, 3)
    done(one, 3)
    texts = [row[4] for row in stored(one)]
    assert texts[:3] == ["from the first", "from the first", "long 9900"]
    assert long_text(9900).startswith(texts[3]) and texts[4:] == ["not now", "not now"]
    # Both at once, each in its own conversation.
    for page, text in ((one, "a1"), (two, "b2")):
        page.get_by_role("button", name="New conversation").click()
        say(page, text)
    done(one)
    done(two)
    expect(one.locator(".chat-name")).to_have_count(3)
    assert sorted(row[4] for row in stored(two) if len(row[4]) == 2) == ["a1", "a1", "b2", "b2"]


EXPIRE = """() => new Promise((resolve) => {
  indexedDB.open("specserve").onsuccess = (event) => {
    const database = event.target.result;
    const chats = database.transaction("chats", "readwrite").objectStore("chats");
    chats.getAll().onsuccess = ({ target }) => {
      for (const chat of target.result) { chat.writer.until = 1; chats.put(chat); }
    };
    chats.transaction.oncomplete = () => { database.close(); resolve(); };
  };
})"""


# A lease that ran out is taken by who looks first: here before its owner renews it.
TAKE = """() => new Promise((resolve) => {
  indexedDB.open("specserve").onsuccess = (event) => {
    const database = event.target.result;
    const chats = database.transaction("chats", "readwrite").objectStore("chats");
    chats.getAll().onsuccess = ({ target }) => {
      for (const chat of target.result) {
        const tab = sessionStorage.getItem("specserve.tab");
        chat.writer = { tab, until: Date.now() + 5000 };
        chats.put(chat);
      }
    };
    chats.transaction.oncomplete = () => { database.close(); resolve(); };
  };
})"""


def test_a_duplicated_tab_is_a_tab_of_its_own(reader: Reader) -> None:
    page = reader.open()
    expect(page.locator("#model")).to_have_text("echo")
    with page.expect_popup() as opened:
        page.evaluate("void window.open(location.href)")
    copied = opened.value
    expect(copied.locator("#model")).to_have_text("echo")
    name = "sessionStorage.getItem('specserve.tab')"
    assert page.evaluate(name) != copied.evaluate(name)
    before = page.evaluate(name)
    page.reload()
    expect(page.locator("#model")).to_have_text("echo")
    assert page.evaluate(name) == before


def test_a_closed_tabs_answer_is_taken_over(patient: Reader) -> None:
    one, two = patient.open(), patient.open()
    say(one, "long 9900")
    expect(answers(one)).to_contain_text("quick brown")
    two.locator(".chat-name").click()
    stored(one)  # comes after what that page is storing: whom to ask for the rest
    one.close()
    two.evaluate(EXPIRE)  # instead of waiting for the lease to run out
    expect(two.locator("#stop")).to_be_visible()
    two.locator("#stop").click()
    done(two)
    text = stored(two)[1][4]
    assert text == long_text(9900)[: len(text)] and len(text) > 100


def test_a_tab_whose_lease_ran_out_gives_way(patient: Reader) -> None:
    one, two = patient.open(), patient.open()
    say(one, "long 9900")
    expect(answers(one)).to_contain_text("quick brown")
    two.locator(".chat-name").click()
    expect(two.locator("#input")).to_have_attribute("placeholder", re.compile("another tab"))
    stored(one)
    two.evaluate(TAKE)
    # Now the other way round: the first only looks on, and the answer goes on undisturbed.
    expect(two.locator("#stop")).to_be_visible()
    expect(one.locator("#stop")).to_be_hidden()
    expect(one.locator("#input")).to_have_attribute("placeholder", re.compile("another tab"))
    two.locator("#stop").click()
    done(two)
    done(one)
    expect(answers(one)).to_contain_text("Stopped.")
    text = stored(one)[1][4]
    assert long_text(9900).startswith(text) and len(text) > 100


LATE = """async () => {
  const app = document.querySelector("script[type=module]").src;
  const { Store } = await import(app.replace("app.js", "store.js"));
  const [one, two] = ["one", "two"].map((tab) => {
    const made = new Store({ onchange() {}, ontrouble(error) { throw error; } });
    made.ownName = async () => { made.tab = tab; };
    return made;
  });
  await one.open();
  await two.open();
  const message = { id: "m0", at: 0, role: "assistant", text: "", state: "writing" };
  const writer = { tab: "two", until: Date.now() + 5000 };
  const live = { gen: "g", seq: 0, token: "t" };
  const change = (chat) => { chat.writer = writer; };
  await one.change("late", { add: [{ ...message, live }], change });
  const said = [await two.progress("late", { ...message, text: "whole", state: "stopped" })];
  said.push(await one.progress("late", { ...message, text: "half", state: "lost" }));
  return [said, (await one.messages("late"))[0].text];
}"""


def test_a_tab_that_learns_late_of_its_loss_overwrites_nothing(reader: Reader) -> None:
    """The other one has gone on with the answer, and ended it."""
    assert reader.open().evaluate(LATE) == [["kept", "taken"], "whole"]


HOSTILE = (
    "<img src=x onerror=\"document.title='owned'\">",
    "<script>document.title='owned'</script>",
    "<svg onload=\"document.title='owned'\"><a href='javascript:alert(1)'>x</a></svg>",
    "[click](javascript:document.title='owned') [data](data:text/html,<script>1</script>)",
    "![pic](https://evil.example/p.png) <iframe src=https://evil.example></iframe>",
    "<style>body{display:none}</style><link rel=stylesheet href=https://evil.example/x.css>",
    "`<img src=x onerror=alert(1)>`\n\n```html\n<img src=x onerror='document.title=1'>\n```",
    '<a href="https://evil.example" onclick="document.title=\'owned\'" class="primary">x</a>',
    "<form action=https://evil.example><button>x</button></form><math><mtext><style><img src=x>",
    '[x](https://ok.example "onmouseover=alert(1)") <https://auto.example>',
    "[a]: javascript:alert(1)\n\n[a][a] | <details open ontoggle=alert(1)>",
)


def test_hostile_text_does_nothing(reader: Reader) -> None:
    page = reader.open()
    say(page, "\n\n".join(HOSTILE))
    done(page)
    body = answers(page).locator(".body")
    expect(body.locator("a[href]").first).to_be_attached(timeout=30_000)  # drawn to the end
    page.wait_for_timeout(200)
    assert page.title().endswith("spec-serve") and "owned" not in page.title().split("=")[0]
    kinds = body.evaluate("e => [...new Set([...e.querySelectorAll('*')].map(n => n.localName))]")
    assert not set(kinds) & {"img", "script", "svg", "iframe", "style", "link", "form", "math"}
    names = body.evaluate(
        "e => [...new Set([...e.querySelectorAll('*')].flatMap(n => n.getAttributeNames()))]"
    )
    allowed = {"href", "target", "rel", "class", "type", "aria-label", "aria-live", "tabindex"}
    assert set(names) <= allowed
    links = body.evaluate("e => [...e.querySelectorAll('a[href]')].map(a => [a.protocol, a.rel])")
    assert links and {protocol for protocol, _ in links} == {"https:"}
    assert all("noopener" in rel for _, rel in links)
    expect(body).to_contain_text("<script>document.title='owned'</script>")
    # The policy would stop what the sanitiser let through.
    refused = page.evaluate(
        """() => {
          try { document.body.insertAdjacentHTML("beforeend", "<b>x</b>"); return false; }
          catch { return true; }
        }"""
    )
    assert refused
    reader.complaints = [c for c in reader.complaints if "TrustedHTML" not in c]


def test_a_page_under_a_foreign_name_is_told_why(chromium: Browser, server: PageServer) -> None:
    reader = Reader(chromium.new_context(), server, host="page.test")
    page = reader.open()
    expect(page.locator("#connection")).to_contain_text("--allow-origins")
    expect(page.locator("#model")).to_be_empty()
    reader.context.close()


def test_a_key_is_asked_for_and_not_kept(chromium: Browser) -> None:
    with page_server({"run": 4}, api_keys=["the-right-key-of-many"]) as server:
        reader = Reader(chromium.new_context(), server)
        page = reader.open()
        dialog = page.get_by_role("dialog", name="This server asks for a key")
        dialog.get_by_label("API key").fill("a-wrong-key-of-the-length")
        dialog.get_by_role("button", name="Connect").click()
        expect(dialog).to_contain_text("not known here")
        dialog.get_by_label("API key").fill("the-right-key-of-many")
        dialog.get_by_role("button", name="Connect").click()
        expect(page.locator("#model")).to_have_text("echo")
        say(page, "hello")
        done(page)
        kept(page)
        page.reload()
        expect(page.locator("#model")).to_have_text("echo")
        assert "the-right-key-of-many" not in page.evaluate("JSON.stringify(localStorage)")
        other = reader.open()
        expect(other.get_by_role("dialog", name="This server asks for a key")).to_be_visible()
        reader.context.close()
        assert reader.foreign == []


FILL = """async ([turns, text]) => {
  const app = document.querySelector("script[type=module]").src;
  const { Store } = await import(app.replace("app.js", "store.js"));
  const store = new Store({ onchange() {}, ontrouble(error) { throw error; } });
  await store.open();
  const add = [];
  for (let at = 0; at < turns; at += 1) {
    const role = at % 2 ? "assistant" : "user";
    add.push({ id: `m${at}`, at, role, text: at % 2 ? text : `Question ${at}`, state: "done" });
  }
  await store.change("big", { add, change: (chat) => { chat.title = "A long history"; } });
}"""
WATCH = """() => {
  window.work = { added: 0, outside: 0, frames: 0 };
  const log = document.querySelector("#log");
  new MutationObserver((records) => {
    for (const record of records) {
      work.added += record.addedNodes.length;
      const last = log.querySelector(".message:last-child");
      if (record.target !== log && !last.contains(record.target)) work.outside += 1;
    }
  }).observe(log, { childList: true, subtree: true, characterData: true });
}"""


def test_a_history_of_20000_tokens_stays_light(reader: Reader) -> None:
    """The engine's tokens are bytes: what a model calls 20,000 tokens is some 80 KB of text."""
    page = reader.open()
    page.evaluate(FILL, [80, long_text(2000)])
    page.reload()
    page.locator(".chat-name", has_text="A long history").click()
    expect(page.locator(".message")).to_have_count(80)
    page.evaluate(WATCH)
    say(page, "long 1000")
    expect(answers(page)).to_have_count(41)
    page.locator("#input").press_sequentially("typed meanwhile", delay=5)
    done(page, 41)
    expect(page.locator("#input")).to_have_value("typed meanwhile")
    work = page.evaluate("work")
    assert work["outside"] == 0  # no earlier message was touched
    # 200 steps; each draws at most the last piece (one paragraph) and a ghost anew.
    assert work["added"] < 200 * 6 + 60


def test_an_answer_of_20000_tokens_draws_only_its_end(reader: Reader) -> None:
    page = reader.open()
    page.evaluate(WATCH)
    say(page, "long 20000")
    page.locator("#input").press_sequentially("still here", delay=10)
    done(page)
    expect(page.locator("#input")).to_have_value("still here")
    assert stored(page)[1][4] == long_text(20000)
    pieces = len(long_text(20000).split("\n\n"))
    # What was ready by the time of a drawing is one piece: fewer where drawings are few.
    assert 1 < answers(page).locator(".piece").count() <= pieces + 1
    # 400 steps and `pieces` pieces, not 400 times all pieces.
    assert page.evaluate("work.added") < 400 * 6 + 4 * pieces
    assert page.evaluate("[...CSS.highlights.values()].reduce((n, h) => n + h.size, 0)") < 4000


def overflow(page: Page) -> int:
    width: int = page.evaluate(
        "Math.max(document.documentElement.scrollWidth, document.body.scrollWidth) - innerWidth"
    )
    return width


def test_a_phone_needs_no_sideways_scrolling(phone: Reader) -> None:
    page = phone.open()
    assert overflow(page) <= 0
    wide = "| " + " | ".join(f"column {n}" for n in range(12)) + " |\n" + "|---" * 12 + "|\n"
    say(page, f"{'unbroken' * 40}\n\n```\n{'code ' * 60}\n```\n\n{wide}")
    page.locator("#send").click()
    done(page)
    assert overflow(page) <= 0
    assert page.locator("#scroller").evaluate("e => e.scrollWidth - e.clientWidth") <= 0
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(22, 24, 22)"
    page.get_by_role("button", name="Conversations").click()
    expect(page.locator("#sidebar")).to_be_in_viewport()
    page.keyboard.press("Escape")
    expect(page.locator("#sidebar")).not_to_be_in_viewport()
    page.get_by_role("button", name="Speculation").click()
    expect(page.locator("#panel")).to_be_in_viewport()
    assert overflow(page) <= 0
    small = page.evaluate(
        """() => [...document.querySelectorAll("button")].filter((b) => b.checkVisibility()
          && b.getBoundingClientRect().height < 24).map((b) => b.outerHTML)"""
    )
    assert small == []


def test_a_full_storage_costs_no_answer(reader: Reader) -> None:
    page = reader.open()
    say(page, "kept")
    done(page)
    page.evaluate(
        """() => {
          window.put = IDBObjectStore.prototype.put;
          IDBObjectStore.prototype.put = () => {
            throw new DOMException("full", "QuotaExceededError");
          };
        }"""
    )
    say(page, "not kept")
    done(page, 2)
    expect(page.locator("#notice")).to_contain_text("storage is full")
    expect(answers(page).nth(1).locator(".body")).to_have_text("not kept")
    assert len(stored(page)) == 2
    page.evaluate("() => { IDBObjectStore.prototype.put = window.put; }")
    say(page, "kept again")
    done(page, 3)
    assert [row[4] for row in stored(page)] == ["kept"] * 2 + ["not kept"] * 2 + ["kept again"] * 2


def test_a_browser_that_keeps_nothing_can_still_talk(reader: Reader) -> None:
    reader.context.add_init_script(
        "IDBFactory.prototype.open = () => { throw new DOMException('no', 'SecurityError'); };"
    )
    page = reader.open()
    expect(page.locator("#notice")).to_contain_text("keeps nothing")
    say(page, "one")
    done(page)
    say(page, "history?")
    done(page, 2)
    expect(answers(page).nth(1).locator(".body")).to_have_text(
        "user: one; assistant: one; user: history?"
    )
    page.get_by_role("button", name="New conversation").click()
    page.locator(".chat-name").click()
    expect(page.locator(".message")).to_have_count(4)


def test_editing_while_an_answer_is_written_stops_it(patient: Reader) -> None:
    page = patient.open()
    say(page, "long 9900")
    expect(answers(page)).to_contain_text("quick brown")
    page.locator(".message.user").get_by_role("button", name="Edit").click()
    page.get_by_label("Edit your message").fill("short")
    page.get_by_label("Edit your message").press("Enter")
    expect(page.locator(".message .body")).to_have_text(["short", "short"])
    done(page)
    assert [row[4] for row in stored(page)] == ["short", "short"]
