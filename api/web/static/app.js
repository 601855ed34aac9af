// The page: puts link, store, conversation and what stands around them together.
//
// Everything shown lives in the modules; here it is decided when. No framework, no build.

import { Conversation } from "./conversation.js";
import { askKey, askRemove, askSettings, askTitle, key, nextTheme, setting, settings, showTheme } from "./settings.js";
import { showChats } from "./sidebar.js";
import { Link } from "./socket.js";
import { drawTree, showHistogram, showLegend, showStrip } from "./speculation.js";
import { Store } from "./store.js";

const $ = (id) => document.getElementById(id);
const NARROW = matchMedia("(max-width: 1100px)"), PHONE = matchMedia("(max-width: 760px)");
const STATES = {
  connecting: "Connecting…", open: "", waiting: "Connection lost. Trying again…", draining: "The server is restarting…",
  key: "An API key is needed.",
};
const WHY = { waiting: "waiting for the server", connecting: "waiting for the server", key: "an API key is needed", draining: "", open: "" };
const REFUSED = "The server refuses this page’s socket; its --allow-origins may have to name this address.";
const REMEDIES = { waiting: "Try now", key: "Enter a key" };
const FIGURES_MS = 200, PLACE = "specserve.chat";

const app = $("app"), log = $("log"), scroller = $("scroller"), input = $("input");
let chats = [], pinned = true, figuresDue = 0, shownAnswer = null, begun = false, begin;
const beginning = new Promise((resolve) => { begin = () => { begun = true; resolve(); }; });

// ---- notices

function notice(text) {
  $("notice-text").textContent = text;
  $("notice").hidden = !text;
}
$("notice-close").addEventListener("click", () => notice(""));

// ---- link, store, conversation

const address = new URL("v1/stream", location.href);
address.protocol = location.protocol === "https:" ? "wss:" : "ws:";
address.search = address.hash = "";

const link = new Link({
  url: address.href,
  key,
  onstate: async (state, detail) => {
    $("connection").textContent = (detail === "refused" ? REFUSED : STATES[state]) ?? "";
    $("connection").dataset.state = state;
    if (REMEDIES[state]) $("reconnect").textContent = REMEDIES[state];
    $("reconnect").hidden = !REMEDIES[state];
    for (const answer of conversation.running.values()) answer.view?.waitsFor(WHY[state] ?? "");
    showComposer();
    if (state === "key" && (await askKey(detail === "wrong"))) link.connect();
  },
  onerror: (message) => notice(message.message),
  onhello: (hello) => {
    $("model").textContent = hello.models.length ? (hello.models.includes(settings().model) ? settings().model : hello.models[0]) : "";
  },
});

const store = new Store({
  onchange: async ({ chat, what }) => {
    await refresh();
    if (chat === conversation.id && !conversation.answer && (conversation.chat || what !== "removed")) await conversation.read();
  },
  ontrouble: (error, unavailable) => notice(
    unavailable ? "This browser keeps nothing for this page: conversations last until it is closed."
      : error?.name === "QuotaExceededError" ? "The browser’s storage is full: delete conversations to keep new ones."
        : `Could not be kept in this browser: ${error?.message ?? error}`),
});

const conversation = new Conversation({
  store, link, log,
  on: {
    changed: (answer) => { refresh(); showAround(); if (answer && answer.chat === conversation.id) showFigures(answer); },
    step: (answer) => {
      const now = performance.now();
      if (now < figuresDue) return;
      figuresDue = now + FIGURES_MS;
      showFigures(answer);
    },
    grown: () => { if (pinned) toEnd(); },
    trouble: notice,
  },
});

// ---- what stands around the messages

async function refresh() {
  chats = await store.chats();
  showChats(chats, conversation.id, (id) => conversation.writes(id), {
    pick: (id) => { show(id); closeSidebar(); },
    rename: async (chat) => {
      const title = await askTitle(chat.title);
      if (!title) return;
      try {
        const made = await store.change(chat.id, { change: (held) => { held.title = title; } });
        if (chat.id === conversation.id) conversation.chat = made;
      } catch (error) { store.ontrouble(error); }
      await refresh();
      showAround();
    },
    remove: async (chat) => {
      if (!(await askRemove(chat.title || "New conversation"))) return;
      for (const answer of conversation.running.values()) if (answer.chat === chat.id) answer.stop();
      await store.remove(chat.id).catch((error) => store.ontrouble(error));
      if (chat.id === conversation.id) startNew();
      else await refresh();
      input.focus();
    },
  });
}

function showAround() {
  const title = conversation.chat?.title || "New conversation";
  $("title").textContent = title;
  document.title = conversation.chat ? `${title} · spec-serve` : "spec-serve";
  $("empty").hidden = conversation.views.length > 0;
  try {
    if (conversation.chat) sessionStorage.setItem(PLACE, conversation.id);
    else sessionStorage.removeItem(PLACE);
  } catch { /* not kept */ }
  showComposer();
  if (pinned) toEnd();
}

function showComposer() {
  const writing = conversation.answer !== null, elsewhere = !writing && conversation.elsewhere;
  const focused = document.activeElement;
  $("stop").hidden = !writing;
  $("send").hidden = writing;
  $("send").disabled = elsewhere || !input.value.trim();
  if (writing && focused === $("send")) $("stop").focus();
  if (!writing && focused === $("stop")) input.focus();
  input.placeholder = elsewhere ? "An answer is being written in another tab" : "Message";
}

async function show(id) {
  pinned = true;
  clearFigures();
  await conversation.open(id);
  const last = conversation.views.findLast((view) => view.message.sum);
  if (conversation.answer) showFigures(conversation.answer);
  else if (last) showSum(last.message.sum);
  toEnd();
}

function startNew() {
  conversation.startNew();
  clearFigures();
  closeSidebar();
  input.focus();
}

// ---- figures

function showSum(sum) {
  showStrip($("strip"), sum);
  showLegend($("legend"), sum.sources);
  showHistogram($("histogram"), sum.histogram);
}

function showFigures(answer) {
  showSum(answer.figures.summary());
  const last = answer.lastStep;
  if (last && (last.step.ids.length || shownAnswer !== answer)) {
    shownAnswer = answer;
    $("tree").replaceChildren(drawTree(last.step, last.path, last.bonus));
    $("tree-caption").textContent = last.step.drafted
      ? `Step ${last.step.step}: ${last.step.accepted} of ${last.step.drafted} guesses accepted.`
      : `Step ${last.step.step}: no guesses, one token of the model’s own.`;
  }
}

function clearFigures() {
  shownAnswer = null;
  $("strip").hidden = true;
  $("tree").replaceChildren();
  $("tree-caption").textContent = "Guesses of the latest step appear here.";
  showLegend($("legend"), {});
  showHistogram($("histogram"), []);
}

// ---- scrolling

function toEnd() { scroller.scrollTop = scroller.scrollHeight; }

// Only the reader's own scrolling up lets go of the end; what grows below does not.
let lastTop = 0;
scroller.addEventListener("scroll", () => {
  const left = scroller.scrollHeight - scroller.scrollTop - scroller.clientHeight;
  if (left < 40) pinned = true;
  else if (scroller.scrollTop < lastTop - 2) pinned = false;
  lastTop = scroller.scrollTop;
  $("to-end").hidden = pinned || left < 40;
}, { passive: true });
$("to-end").addEventListener("click", () => { pinned = true; toEnd(); });
const watcher = new ResizeObserver(() => { if (pinned) toEnd(); });
watcher.observe(log);
watcher.observe(scroller);

// ---- composer

function fit() {
  input.style.height = "auto";
  input.style.height = `${Math.min(input.scrollHeight, innerHeight * 0.4)}px`;
}

async function submit() {
  const text = input.value;  // what stands there now, not what is typed while the store opens
  if (!text.trim() || conversation.busy || conversation.elsewhere) return;
  input.value = "";
  fit();
  pinned = true;
  notice("");
  if (!begun) await beginning;  // a store that is not open would not know what was said
  if (conversation.elsewhere || !(await conversation.send(text))) {  // back into the box, before what was typed meanwhile
    input.value = input.value ? `${text}\n${input.value}` : text;
    fit();
  }
  showComposer();
}

$("composer").addEventListener("submit", (event) => { event.preventDefault(); submit(); });
input.addEventListener("input", () => { fit(); showComposer(); });
input.addEventListener("keydown", (event) => {
  // Where there is no keyboard, Enter starts a line and the button sends.
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing && !matchMedia("(pointer: coarse)").matches) {
    event.preventDefault();
    submit();
  }
});
$("stop").addEventListener("click", () => conversation.stop());
addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || document.querySelector("dialog[open]")) return;
  if (app.classList.contains("sidebar-open")) closeSidebar(true);
  else if (NARROW.matches && app.classList.contains("panel-open")) showPanel(false, true);
  else conversation.stop();
});
log.addEventListener("click", async (event) => {
  const made = event.target.closest(".copy-code");
  if (!made) return;
  const { copyInto } = await import("./messages.js");
  copyInto(made, made.closest(".code").querySelector("pre").textContent);
});

// ---- sidebar, panel, dialogs

const behind = (inert) => { for (const part of [document.querySelector(".main"), $("panel")]) part.inert = inert; };

function openSidebar() {
  app.classList.add("sidebar-open");
  behind(true);
  $("scrim").hidden = false;
  $("open-sidebar").setAttribute("aria-expanded", "true");
  $("new-chat").focus();
}

function closeSidebar(back = false) {
  if (!app.classList.contains("sidebar-open")) return;
  app.classList.remove("sidebar-open");
  behind(false);
  $("scrim").hidden = true;
  $("open-sidebar").setAttribute("aria-expanded", "false");
  if (back) $("open-sidebar").focus();
}

function showPanel(open, back = false) {
  app.classList.toggle("panel-open", open);
  $("panel").hidden = !open;
  $("toggle-panel").setAttribute("aria-expanded", String(open));
  if (back) $("toggle-panel").focus();
}

$("open-sidebar").addEventListener("click", openSidebar);
$("close-sidebar").addEventListener("click", () => closeSidebar(true));
$("scrim").addEventListener("click", () => closeSidebar(true));
$("new-chat").addEventListener("click", startNew);
$("toggle-panel").addEventListener("click", () => showPanel(!app.classList.contains("panel-open")));
$("close-panel").addEventListener("click", () => showPanel(false, true));
NARROW.addEventListener("change", () => showPanel(!NARROW.matches));
PHONE.addEventListener("change", () => closeSidebar());
$("theme").addEventListener("click", nextTheme);
$("reconnect").addEventListener("click", async () => {
  if (link.state === "key" && (await askKey(false))) link.connect();
  else link.now();
});
$("open-settings").addEventListener("click", async () => {
  const system = await askSettings(conversation.system, link.hello?.models ?? []);
  if (system !== null && system !== conversation.system) await conversation.setSystem(system);
});

function showColours(on) {
  document.documentElement.dataset.sources = on ? "on" : "off";
  $("show-sources").checked = on;
}
$("show-sources").addEventListener("change", (event) => {
  setting("sources", event.target.checked);
  showColours(event.target.checked);
});

// ---- begin

showTheme();
showColours(settings().sources !== false);
showPanel(!NARROW.matches);
clearFigures();
await store.open();
await refresh();
let last = null;
try { last = sessionStorage.getItem(PLACE); } catch { /* a tab without storage */ }
if (last && chats.some((chat) => chat.id === last)) await show(last);
else showAround();
await conversation.restore(chats);
begin();
link.connect();
// A tab that wrote here may be gone: then its answer is taken over.
setInterval(async () => {
  if (!conversation.chat?.writer || conversation.answer) return;
  await conversation.read();
  if (conversation.elsewhere) return;
  await conversation.restore(await store.chats());
  showComposer();
}, 2000);
input.focus();
