// The conversation on the screen: its messages as views, turns asked, answers running behind.
//
// Every change goes to the store first, in one transaction that names the revision it was made for;
// what another tab did shows by reading anew. Knows views, answers, the store and the link; not
// what stands around the messages.

import { Answer } from "./answer.js";
import { MessageView } from "./messages.js";
import { asked, settings } from "./settings.js";
import { LEASE_MS, Stale, randomId } from "./store.js";

const TITLE = 60;

class Busy extends Error {}

const titleOf = (text) => text.replace(/\[([^\]]*)\]\([^)]*\)/g, "$1").replace(/[*`~]+|^[#>]+/gm, "").replace(/\s+/g, " ").trim().slice(0, TITLE);

export class Conversation {
  // on: { changed(), step(answer), grown(), trouble(text) }
  constructor({ store, link, log, on }) {
    Object.assign(this, { store, link, log, on });
    this.running = new Map();  // message id -> Answer, of all chats
    this.turning = new Set();  // ids of chats where a turn is being taken
    this.reset();
  }

  reset() {
    for (const view of this.views ?? []) view.discard();
    for (const answer of this.running.values()) answer.view = null;
    this.id = randomId();
    this.chat = null;    // its record, null until something was said
    this.system = "";
    this.views = [];
    this.opening = 0;
  }

  // The answer that is being written here by this tab.
  get answer() { return [...this.running.values()].find((answer) => answer.chat === this.id) ?? null; }

  // Whether an answer is written here, or a turn taken that will have one.
  get busy() { return this.answer !== null || this.turning.has(this.id); }

  get elsewhere() { return this.store.writtenElsewhere(this.chat); }

  writes(id) { return [...this.running.values()].some((answer) => answer.chat === id); }

  startNew() { this.reset(); this.on.changed(); }

  async open(id) {
    this.reset();
    this.id = id;
    await this.read();
  }

  // Reads the conversation anew; keeps views of messages that are the same.
  async read() {
    const turn = (this.opening += 1), id = this.id;
    const [chat, messages] = await Promise.all([this.store.chat(id), this.store.messages(id)]);
    if (turn !== this.opening || id !== this.id) return;
    if (!chat) { this.startNew(); return; }
    this.chat = chat;
    this.system = chat.system;
    // A history is no news: a screen reader would read all of it aloud.
    this.log.setAttribute("aria-live", "off");
    setTimeout(() => this.log.setAttribute("aria-live", "polite"), 300);
    let same = 0;
    while (same < messages.length && this.views[same]?.message.id === messages[same].id) same += 1;
    for (const view of this.views.splice(same)) view.discard();
    for (let i = 0; i < same; i += 1) {
      const view = this.views[i], message = messages[i];
      if (this.running.has(message.id) || (view.message.text === message.text && view.message.state === message.state)) continue;
      view.show(message, i === messages.length - 1);
    }
    for (const message of messages.slice(same)) this.add(message, message.at === messages.length - 1);
    this.on.changed();
  }

  add(message, coloured = true) {
    const view = new MessageView({ ...message, spans: coloured ? message.spans : undefined }, {
      edit: (which, text) => this.turn(which.message.at, { user: text }),
      regenerate: (which) => this.turn(which.message.at, {}),
      goOn: (which) => this.turn(which.message.at, { after: which.message }),
      grown: () => this.on.grown(),
    });
    this.views.push(view);
    this.log.append(view.element);
    this.running.get(message.id)?.attach(view);
    return view;
  }

  send(text) { return this.turn(this.views.length, { user: text }); }

  // Says something at a place (what stands there and behind it goes), or asks for the answer there
  // anew. after: an answer that was cut, to be had again with the same seed; its text is sent as the
  // prediction, so that what is known already is only checked. Resolves to whether it was taken.
  async turn(at, what) {
    const { id } = this;
    if (this.elsewhere || this.turning.has(id)) return false;
    this.turning.add(id);
    try { return await this.take(at, what); } finally { this.turning.delete(id); }
  }

  async take(at, { user, after }) {
    if (this.answer) await this.answer.stopped();
    const earlier = this.views.slice(0, at).map((view) => view.message);
    const add = [];
    if (user !== undefined) add.push({ id: randomId(), at, role: "user", text: user, state: "done" });
    const request = after?.asked ? structuredClone(after.asked) : asked();
    if (this.link.hello && !this.link.hello.models.includes(request.model)) delete request.model;
    const gen = randomId();
    add.push({
      id: randomId(), at: at + add.length, role: "assistant", text: "", state: "writing",
      asked: structuredClone(request), live: { gen, seq: -1, token: "" },
    });
    if (after) request.speculation = { ...request.speculation, prediction: after.text.slice(0, 1_000_000) };
    request.messages = this.history([...earlier, ...add.slice(0, -1)]);
    request.ids = true;
    request.steps = "tokens";
    if (!(await this.keep(at, [...earlier.filter((m) => m.unsaved), ...add], user))) return false;
    for (const view of this.views.splice(at)) view.discard();
    for (const message of add) message.chat = this.id;
    this.run(add.at(-1), (answer) => answer.begin(request), add.slice(0, -1));
    return true;
  }

  run(message, begin, before = []) {
    const answer = new Answer({
      link: this.link, store: this.store, chat: message.chat, message,
      on: {
        step: (which) => { if (which.chat === this.id) this.on.step(which); },
        over: (which) => {
          this.running.delete(which.message.id);
          if (which.left && which.chat === this.id) this.read();
          else if (which.chat === this.id && this.chat) this.chat.writer = null;
          this.on.changed(which);
        },
      },
    });
    this.running.set(message.id, answer);
    for (const earlier of before) this.add(earlier);
    if (message.chat === this.id) {
      const shown = this.views.find((view) => view.message.id === message.id);
      if (shown) answer.attach(shown);
      else this.add(message);
    }
    begin(answer);
    this.on.changed();
  }

  // Stores a turn. False if another tab was quicker; what can't be stored is shown all the same.
  async keep(at, add, user) {
    const { id, store } = this;
    try {
      const chat = await store.change(id, {
        rev: this.chat ? this.chat.rev : null,
        keep: at,
        add,
        change: (held) => {
          if (store.writtenElsewhere(held)) throw new Busy();
          held.system = this.system;
          held.title ||= titleOf(user ?? "");
          held.writer = { tab: store.tab, until: Date.now() + LEASE_MS };
        },
      });
      if (id !== this.id) return false;
      this.chat = chat;
      for (const message of add) delete message.unsaved;
    } catch (error) {
      if (error instanceof Stale || error instanceof Busy) {
        await this.read();
        this.on.trouble(error instanceof Busy
          ? "Another tab is writing in this conversation."
          : "This conversation was changed in another tab; look at it and send again.");
        return false;
      }
      store.ontrouble(error);
      for (const message of add) message.unsaved = true;  // tried again with the next turn
      this.chat ??= { id, title: titleOf(user ?? ""), system: this.system, rev: 0, writer: null };
    }
    return true;
  }

  history(messages) {
    const turns = messages.filter((m) => m.text).map((m) => ({ role: m.role, content: m.text }));
    return this.system ? [{ role: "system", content: this.system }, ...turns] : turns;
  }

  stop() { this.answer?.stop(); }

  async setSystem(text) {
    this.system = text;
    if (!this.chat) return;
    try {
      this.chat = await this.store.change(this.id, { change: (held) => { held.system = text; } });
    } catch (error) { this.store.ontrouble(error); }
  }

  // After a page load: answers this tab, or one that is gone, was writing. The server may have more.
  async restore(chats) {
    if (this.restoring) return;
    this.restoring = true;
    try { await this.takeOver(chats); } finally { this.restoring = false; }
  }

  async takeOver(chats) {
    for (const chat of chats) {
      if (!chat.writer || this.store.writtenElsewhere(chat) || this.writes(chat.id)) continue;
      const message = (await this.store.messages(chat.id)).findLast((m) => m.live);
      try {
        const held = await this.store.change(chat.id, {
          rev: chat.rev,
          change: (record) => { record.writer = message ? { tab: this.store.tab, until: Date.now() + LEASE_MS } : null; },
        }, "progress");
        if (chat.id === this.id) this.chat = held;
      } catch { continue; }  // another tab was quicker
      if (!message || this.running.has(message.id)) continue;
      message.live.token ? this.run(message, (answer) => answer.adopt()) : this.run(message, (answer) => answer.lost("gap"));
    }
  }

  // Whether the text is coloured by source.
  get coloured() { return settings().sources !== false; }
}
