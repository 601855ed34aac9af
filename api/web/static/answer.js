// An answer being written: messages of a generation become a message record, saved as it grows.
//
// Goes on whether it is shown or not; `view` is set while it is. Knows the link, the store and the
// figures; nothing of the page around.

import { packSpans } from "./messages.js";
import { Figures, parts } from "./speculation.js";
import { LEASE_MS } from "./store.js";

const SAVE_MS = 1000;
const REASONS = { stop: "done", length: "length", cancelled: "stopped" };

export class Answer {
  // on: { step(answer), over(answer) }
  constructor({ link, store, chat, message, on }) {
    Object.assign(this, { link, store, chat, message, on });
    this.gen = message.live.gen;
    this.figures = new Figures(performance.now());
    this.text = message.text;
    this.spans = [];
    const held = message.spans;
    for (let i = 0; held && i < held.flat.length; i += 3) this.spans.push([held.flat[i], held.flat[i + 1], held.sources[held.flat[i + 2]]]);
    this.view = null;
    this.lastStep = null;
    this.saved = -1;
    this.dirty = false;
    this.seq = message.live.seq;
    this.over = false;
    this.timer = setInterval(() => this.save(), SAVE_MS);
    this.renewed = Date.now();
  }

  begin(request) {
    this.link.generate(this.gen, request, (message) => this.take(message), (why) => this.lost(why));
  }

  adopt() {
    this.link.adopt(this.gen, this.message.live, (message) => this.take(message), (why) => this.lost(why));
  }

  stop() { this.link.cancel(this.gen); }

  // Stops, and resolves once that has happened.
  stopped() {
    return new Promise((resolve) => {
      this.ended = resolve;
      this.stop();
    });
  }

  attach(view) {
    this.view = view;
    view.show({ ...this.message, text: this.text, spans: packSpans(this.spans), state: "writing" });
    view.stream();
  }

  take(message) {
    this.dirty = true;
    if (message.type === "started") this.figures.started(message);
    else if (message.type === "delta") this.grow(message);
    this.seq = message.seq ?? this.seq;  // together with its text, never before it
    if (message.type === "finished") {
      this.figures.finished(message);
      if (message.last !== false) this.end(REASONS[message.reason] ?? "done");
    } else if (message.type === "error") {
      this.end(message.code === "timeout" ? "timeout" : "error", message.message);
    } else if (message.type === "started" || Date.now() - this.renewed > 2 * SAVE_MS) {
      // From the first message on another page load can take over. Later the timer saves, but timers
      // of hidden tabs come rarely.
      this.save();
    }
  }

  grow(message) {
    const delta = { text: message.text ?? "", ids: message.ids ?? [], steps: message.steps ?? [] };
    const found = parts(delta);
    this.figures.delta(found.steps, delta.ids.length, performance.now());
    let at = this.text.length;
    for (const [text, source] of found.parts) {
      if (source !== null) this.spans.push([at, at + text.length, source]);
      at += text.length;
    }
    this.text += delta.text;
    this.lastStep = found.steps.at(-1) ?? this.lastStep;
    this.view?.rich.append(found.parts, found.rejected);
    this.on.step(this);
  }

  // Another tab goes on with this answer; what it writes is shown from the store.
  leave() {
    this.over = this.left = true;
    clearInterval(this.timer);
    this.link.release(this.gen);
    this.on.over(this);
    this.ended?.();
  }

  lost(why) {
    this.end(why === "cancelled" ? "stopped" : "lost");
  }

  end(state, error = "") {
    if (this.over) return;
    this.over = true;
    clearInterval(this.timer);
    const { message } = this;
    message.text = this.text;
    message.spans = packSpans(this.spans);
    message.state = state;
    message.error = error;
    if (this.figures.steps) message.sum = this.figures.summary();
    delete message.live;
    if (this.view) { this.view.message = message; this.view.finish(); }
    if (!message.unsaved) {
      this.store.progress(this.chat, message, "changed").then((said) => {
        if (said === "kept") return this.link.ack(this.gen, this.seq);
        this.left = true;  // another tab has gone on with it: what that wrote is shown
        this.on.over(this);
      }, (trouble) => this.store.ontrouble(trouble));
    }
    this.on.over(this);
    this.ended?.();
  }

  // Keeps what has come, with the number of its last message: text and number belong together.
  async save() {
    if (this.over || this.message.unsaved) return;
    const renew = Date.now() - this.renewed > LEASE_MS / 3;
    if (!this.dirty && !renew) return;
    this.dirty = false;
    this.renewed = Date.now();
    const { seq } = this;
    Object.assign(this.message, { text: this.text, spans: packSpans(this.spans) });
    this.message.live = { gen: this.gen, seq, token: this.link.token(this.gen) || this.message.live.token };
    try {
      const said = await this.store.progress(this.chat, structuredClone(this.message));
      if (this.over) return;
      if (said === "gone") this.stop();
      else if (said === "taken") this.leave();
      else if (seq !== this.saved) { this.saved = seq; this.link.ack(this.gen, seq); }
    } catch (trouble) { this.store.ontrouble(trouble); }
  }
}
