// How one message looks: its text, its state and what can be done with it.
//
// A view is told what to show and says what was clicked; it holds no conversation and no socket.

import { RichText } from "./richtext.js";
import { duration, slot } from "./speculation.js";

const STATES = {
  stopped: "Stopped.",
  length: "The longest answer was reached.",
  lost: "The rest was lost: the server no longer has this answer.",
  timeout: "The time for this answer ran out.",
};

export function icon(name) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  made.setAttribute("aria-hidden", "true");
  made.append(use);
  return made;
}

export function button(name, text, act, kind = "tool") {
  const made = document.createElement("button");
  made.type = "button";
  made.className = kind;
  if (name) made.append(icon(name));
  const said = document.createElement("span");
  said.textContent = text;
  made.append(said);
  made.addEventListener("click", act);
  return made;
}

// Copies, also where the page is not "secure" and browsers have no clipboard for it.
export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    const field = document.createElement("textarea");
    field.value = text;
    field.className = "unseen";
    document.body.append(field);
    field.select();
    const ok = document.execCommand("copy");
    field.remove();
    return ok;
  }
}

export async function copyInto(made, text) {
  const said = made.querySelector("span") ?? made, before = said.textContent;
  said.textContent = (await copy(text)) ? "Copied" : "Can’t copy";
  setTimeout(() => { said.textContent = before; }, 1500);
}

// Spans are kept as flat numbers [start, end, source's place, ...] beside the sources' names.
export function packSpans(spans) {
  const sources = [], flat = [];
  for (const [start, end, source] of spans) {
    if (!sources.includes(source)) sources.push(source);
    flat.push(start, end, sources.indexOf(source));
  }
  return { sources, flat };
}

function unpackSpans({ sources, flat } = { sources: [], flat: [] }) {
  const spans = [];
  for (let i = 0; i < flat.length; i += 3) spans.push([flat[i], flat[i + 1], sources[flat[i + 2]]]);
  return spans;
}

export class MessageView {
  // act: { edit(view, text), regenerate(view), goOn(view), grown() }
  constructor(message, act) {
    this.act = act;
    this.element = document.createElement("article");
    this.element.tabIndex = -1;
    this.body = document.createElement("div");
    this.body.className = "body";
    this.foot = document.createElement("footer");
    this.foot.className = "foot";
    this.element.append(this.body, this.foot);
    this.rich = null;
    this.show(message);
  }

  // Shows a message as it stands. coloured: whether accepted guesses are coloured.
  show(message, coloured = true) {
    this.message = message;
    const mine = message.role === "user";
    this.element.className = `message ${message.role}`;
    this.element.removeAttribute("aria-busy");
    this.element.dataset.state = message.state ?? "done";
    this.element.setAttribute("aria-label", mine ? "You" : "Answer");
    if (mine) this.body.textContent = message.text;
    else {
      this.rich ??= new RichText(this.body, { slot, ongrow: () => this.act.grown() });
      this.rich.coloured = coloured;
      this.rich.set(message.text, coloured ? unpackSpans(message.spans) : []);
    }
    this.showFoot();
  }

  // From now on the text streams in through `rich`.
  stream() {
    this.element.setAttribute("aria-busy", "true");
    this.rich.over = false;
    this.showFoot();
  }

  finish() {
    this.element.removeAttribute("aria-busy");
    this.rich.finish();
    this.showFoot();
  }

  showFoot() {
    const { message, act } = this, mine = message.role === "user", writing = message.state === "writing";
    this.element.dataset.state = message.state ?? "done";
    const tools = document.createElement("div");
    tools.className = "tools";
    const items = [];
    if (message.state === "error") items.push(this.note(message.error || "The answer failed.", "note error"));
    else if (STATES[message.state]) items.push(this.note(STATES[message.state], "note"));
    if (writing) {
      const waiting = this.note("", "waiting");
      waiting.append(...[0, 1, 2].map(() => document.createElement("i")));
      const said = document.createElement("span");
      said.className = "why";
      said.textContent = this.why ?? "";
      waiting.append(said);
      items.push(waiting);
    } else {
      if (message.text) tools.append(button("copy", "Copy", (event) => copyInto(event.currentTarget, message.text)));
      if (mine) tools.append(button("edit", "Edit", () => this.edit()));
      else {
        if (["lost", "stopped"].includes(message.state) && message.text) tools.append(button("send", "Continue", () => act.goOn(this), "tool strong"));
        tools.append(button("again", message.state === "error" ? "Try again" : "Regenerate", () => act.regenerate(this)));
        const sum = message.sum;
        if (sum?.rate) {
          const told = `${sum.perStep.toFixed(2)} tokens per step · ${sum.rate.toFixed(0)} tokens/s · ${duration(sum.ttftMs)}`;
          tools.append(this.note(told, "figures"));
        }
      }
      items.push(tools);
    }
    this.foot.replaceChildren(...items);
  }

  note(text, kind) {
    const made = document.createElement("p");
    made.className = kind;
    made.textContent = text;
    return made;
  }

  // Why nothing comes at the moment.
  waitsFor(text) {
    this.why = text;
    const said = this.foot.querySelector(".why");
    if (said && said.textContent !== text) said.textContent = text;
  }

  edit() {
    if (this.body.querySelector("textarea")) return;
    const form = document.createElement("form"), field = document.createElement("textarea"), actions = document.createElement("div");
    const back = () => { this.body.textContent = this.message.text; this.showFoot(); this.foot.querySelector("button:nth-of-type(2)")?.focus(); };
    const send = button("", "Send", () => {}, "primary");
    send.type = "submit";
    field.value = this.message.text;
    field.setAttribute("aria-label", "Edit your message");
    field.rows = Math.min(12, this.message.text.split("\n").length + 1);
    form.className = "editing";
    actions.className = "actions";
    actions.append(button("", "Cancel", back, "quiet"), send);
    form.append(field, actions);
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      if (field.value.trim()) this.act.edit(this, field.value);
    });
    field.addEventListener("keydown", (event) => {
      if (event.isComposing) return;
      if (event.key === "Enter" && !event.shiftKey) { event.preventDefault(); form.requestSubmit(); }
      if (event.key === "Escape") { event.stopPropagation(); back(); }
    });
    this.foot.replaceChildren();
    this.body.replaceChildren(form);
    field.focus();
    field.setSelectionRange(field.value.length, field.value.length);
  }

  // Lets go of what outlives the element.
  discard() {
    this.rich?.uncolour();
    cancelAnimationFrame(this.rich?.frame);
    this.element.remove();
  }
}
