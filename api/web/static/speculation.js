// What a verify step did: which guesses were accepted, figures of an answer, a picture of the tree.
// Knows the steps of the protocol and draws; nothing of sockets or conversations.

const SVG = "http://www.w3.org/2000/svg";
const LABELS = {
  suffix: "This conversation", radix: "Prefix cache", shared: "Earlier texts", prediction: "Prediction",
  standalone: "Draft model", lookup: "Look-up",
};
const ORDER = ["standalone", "suffix", "radix", "shared", "prediction"];
const SLOTS = 8, MOST_NODES = 40;

const slots = new Map(ORDER.map((name, slot) => [name, slot]));

export const label = (source) => LABELS[source] ?? source;

// The colour of a source: 0 to 7; -1 for none.
export function slot(source) {
  if (source === null || source === undefined || source === "") return -1;
  if (!slots.has(source)) slots.set(source, slots.size < SLOTS ? slots.size : SLOTS - 1);
  return slots.get(source);
}

// A step of the wire, by names.
export function readStep(values) {
  const [step, drafted, accepted, sources, draftUs, verifyUs, hostUs, ids = [], parents = [], texts = [], names = []] = values;
  const used = Object.entries(sources ?? {});
  const of = (node) => names[node] ?? (used.length === 1 ? used[0][0] : used.length ? "mixed" : "");
  return { step, drafted, accepted, sources: sources ?? {}, draftUs, verifyUs, hostUs, ids, parents, texts, of };
}

// The guesses that were accepted, from the root on: those the emitted ids lead along. A step emits
// its accepted guesses and one token of the model's own; at a text's end that one may be missing.
export function acceptedPath(step, emitted) {
  const path = [];
  let parent = -1;
  for (const id of emitted.slice(0, step.accepted)) {
    let found = -1;
    for (let node = 0; node < step.ids.length; node += 1) {
      if (step.parents[node] === parent && step.ids[node] === id) { found = node; break; }
    }
    if (found < 0) break;
    path.push(found);
    parent = found;
  }
  return path;
}

// The first guess that was not accepted and what was guessed behind it.
export function rejectedChain(step, path) {
  const chain = [];
  let parent = path.at(-1) ?? -1;
  for (let node = 0; node < step.ids.length; node += 1) {
    if (step.parents[node] === parent && !path.includes(node)) { chain.push(node); parent = node; }
  }
  return chain;
}

// Splits a delta's text among the tokens of its steps: [text, source | null] in order. What the
// texts of accepted guesses don't explain belongs to the model itself.
export function parts(delta) {
  const steps = delta.steps.map(readStep);
  const found = [];
  let left = delta.text, at = 0, rejected = [];
  const shown = [];
  for (const step of steps) {
    const emitted = delta.ids.slice(at, at + step.accepted + 1);
    const path = acceptedPath(step, emitted);
    at += step.accepted + 1;
    for (const node of path) {
      const text = step.texts[node] ?? "";
      // Torn characters and hidden tokens: the texts don't add up, leave the rest uncoloured.
      const place = left.indexOf(text);
      if (!text || place < 0 || place > 24) continue;
      if (place) found.push([left.slice(0, place), null]);
      found.push([text, step.of(node)]);
      left = left.slice(place + text.length);
    }
    rejected = rejectedChain(step, path).map((node) => step.texts[node] ?? "");
    shown.push({ step, path, bonus: emitted.length > path.length });
  }
  if (left) found.push([left, null]);
  return { parts: found, rejected, steps: shown };
}

// Figures of one answer while it grows.
export class Figures {
  constructor(now) {
    this.asked = now;
    this.first = this.latest = 0;
    this.firstTokens = this.tokens = this.steps = this.drafted = this.accepted = 0;
    this.timed = this.stepUs = this.plainSteps = this.plainUs = 0;
    this.histogram = [];
    this.cached = this.prompt = null;
    this.sources = {};
    this.final = null;
  }

  started(message) { this.cached = message.cached_tokens ?? 0; this.prompt = message.prompt_tokens; }

  delta(steps, tokens, now) {
    this.tokens += tokens;
    this.latest = now;
    if (!this.first && tokens) { this.first = now; this.firstTokens = tokens; }
    for (const { step } of steps) {
      this.steps += 1;
      this.drafted += step.drafted;
      this.accepted += step.accepted;
      if (this.steps > 1) {  // the first one also worked on the prompt
        const us = step.verifyUs + step.hostUs;
        this.timed += 1;
        this.stepUs += us;
        if (!step.drafted) { this.plainSteps += 1; this.plainUs += us; }
      }
      this.histogram[step.accepted] = (this.histogram[step.accepted] ?? 0) + 1;
      for (const [name, [drafted, accepted]] of Object.entries(step.sources)) {
        const held = (this.sources[name] ??= [0, 0]);
        held[0] += drafted;
        held[1] += accepted;
      }
    }
  }

  finished(message) { this.final = message.timings ?? null; }

  // Plain values, to be kept with the message.
  summary() {
    const decodeMs = this.final?.decode_ms || this.latest - this.first;
    const more = this.tokens - this.firstTokens;
    const meanUs = this.plainSteps >= 8 ? this.plainUs / this.plainSteps : this.stepUs / (this.timed || 1);
    return {
      tokens: this.tokens, steps: this.steps, drafted: this.drafted, accepted: this.accepted,
      perStep: this.steps ? this.tokens / this.steps : 0,
      rate: more > 0 && decodeMs > 0 ? (1000 * more) / decodeMs : 0,
      plainRate: meanUs > 0 ? 1e6 / meanUs : 0,
      ttftMs: this.final?.ttft_ms || (this.first ? this.first - this.asked : 0),
      cached: this.cached, prompt: this.prompt,
      histogram: Array.from(this.histogram, (count) => count ?? 0), sources: this.sources,
    };
  }
}

const number = (value) => (value >= 100 ? value.toFixed(0) : value >= 10 ? value.toFixed(1) : value.toFixed(2));

export const duration = (ms) => (ms >= 10_000 ? `${(ms / 1000).toFixed(0)} s` : ms >= 1000 ? `${(ms / 1000).toFixed(1)} s` : `${ms.toFixed(0)} ms`);

// [key, name, value, title] for the strip.
export function stripOf(sum) {
  const rows = [
    ["per-step", "tokens per step", sum.steps ? number(sum.perStep) : "–", "How many tokens each pass of the model yielded, on average."],
    ["rate", "tokens/s", sum.rate ? number(sum.rate) : "–", "Measured over this answer, from its first token on."],
    ["plain", "without speculation (estimate)", sum.plainRate ? `${number(sum.plainRate)}/s` : "–",
      "One token per pass, at the mean time a pass of this answer took in the server. A pass without guesses can be quicker than one with them, so the true figure may be somewhat higher."],
    ["ttft", "first token", sum.ttftMs ? duration(sum.ttftMs) : "–", "Time from asking to the first token."],
  ];
  if (sum.prompt !== null) rows.push(["cached", "prompt cached", `${sum.cached}/${sum.prompt}`, "Prompt tokens that were found in the prefix cache and not computed again."]);
  if (sum.drafted) rows.push(["accepted", "guesses accepted", `${Math.round((100 * sum.accepted) / sum.drafted)} %`, `${sum.accepted} of ${sum.drafted} guesses were right.`]);
  return rows;
}

export function showStrip(list, sum) {
  const rows = stripOf(sum);
  if (list.children.length !== rows.length) {
    list.replaceChildren(...rows.map(() => {
      const item = document.createElement("div");
      item.append(document.createElement("dt"), document.createElement("dd"));
      return item;
    }));
  }
  rows.forEach(([key, name, value, title], i) => {
    const item = list.children[i];
    if (item.dataset.key !== key) { item.dataset.key = key; item.title = title; item.firstElementChild.textContent = name; }
    if (item.lastElementChild.textContent !== value) item.lastElementChild.textContent = value;
  });
  list.hidden = false;
}

export function showLegend(list, sources) {
  const names = Object.keys(sources).sort((a, b) => slot(a) - slot(b));
  list.replaceChildren(...names.map((name) => {
    const item = document.createElement("li"), swatch = document.createElement("span"), text = document.createElement("span");
    const count = document.createElement("span");
    swatch.className = `swatch slot-${slot(name)}`;
    text.textContent = label(name);
    count.className = "count";
    count.textContent = `${sources[name][1]} of ${sources[name][0]}`;
    item.append(swatch, text, count);
    return item;
  }));
  if (!names.length) {
    const item = document.createElement("li");
    item.className = "explain";
    item.textContent = "No guesses yet.";
    list.append(item);
  }
}

export function showHistogram(box, counts) {
  const most = Math.max(1, ...counts), total = counts.reduce((a, b) => a + b, 0);
  const wanted = Math.min(counts.length, 12);
  while (box.children.length > wanted) box.lastElementChild.remove();
  while (box.children.length < wanted) {
    const bar = document.createElement("div"), fill = document.createElement("i"), text = document.createElement("span");
    bar.className = "bar";
    bar.append(fill, text);
    box.append(bar);
  }
  for (let i = 0; i < wanted; i += 1) {
    const bar = box.children[i], share = counts[i] / most;
    bar.firstElementChild.style.height = `${Math.max(share * 100, counts[i] ? 4 : 1)}%`;
    bar.lastElementChild.textContent = String(i + 1);
    bar.title = `${i + 1} token${i ? "s" : ""} in ${counts[i]} of ${total} steps`;
  }
  box.setAttribute("role", "img");
  box.setAttribute("aria-label", total ? `Tokens per step, from 1 up: ${counts.slice(0, wanted).join(", ")} steps` : "No steps yet");
}

function element(name, attributes, text) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  if (text !== undefined) made.textContent = text;
  return made;
}

export const visible = (text) =>
  text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/ /g, "·").replace(/[\u0000-\u001f]/g, "�").slice(0, 10) || "∅";

// The tree of a step: depth to the right, a line for each leaf. Accepted ones filled, then the ring.
export function drawTree(step, path, bonus) {
  const count = Math.min(step.ids.length, MOST_NODES);
  const children = new Map([[-1, []]]);
  for (let node = 0; node < count; node += 1) {
    children.set(node, []);
    children.get(step.parents[node])?.push(node);
  }
  const taken = new Set(path), place = new Map(), last = path.at(-1) ?? -1;
  let line = 0;
  const lay = (node, depth) => {
    // The accepted child first, so that the accepted path is a straight line at the top.
    const below = [...children.get(node)].sort((a, b) => taken.has(b) - taken.has(a));
    const own = line;
    place.set(node, [depth, own]);
    // The model's own token goes on straight behind the accepted ones.
    below.forEach((child, i) => { if (i || (bonus && node === last)) line += 1; lay(child, depth + 1); });
  };
  lay(-1, 0);
  const [lastDepth, lastLine] = place.get(last) ?? [0, 0];
  const columns = Math.max(...[...place.values()].map(([depth]) => depth), bonus ? lastDepth + 1 : 0) + 1;
  const wide = new Array(columns).fill(0);
  for (const [node, [depth]] of place) wide[depth] = Math.max(wide[depth], node < 0 ? 0 : visible(step.texts[node] ?? "").length);
  const starts = [14];
  wide.forEach((letters, depth) => { starts[depth + 1] = starts[depth] + 30 + 6.6 * letters; });
  const gapY = 25, width = starts[columns] + 4, height = (line + 1) * gapY + 12;
  const x = (depth) => starts[depth], y = (row) => 18 + row * gapY;
  const drawing = element("svg", { viewBox: `0 0 ${width} ${height}`, width, height, role: "img",
    "aria-label": `The latest step guessed ${step.drafted} tokens and accepted ${step.accepted}.` });
  const edge = ([d1, l1], [d2, l2], kind) => element("path", { class: kind, d: l1 === l2
    ? `M${x(d1) + 6} ${y(l1)} H${x(d2) - 6}`
    : `M${x(d1) + 6} ${y(l1) + 2} C${x(d1) + 14} ${y(l2)} ${x(d1) + 10} ${y(l2)} ${x(d1) + 22} ${y(l2)} H${x(d2) - 6}` });
  for (let node = 0; node < count; node += 1) {
    const from = place.get(step.parents[node]), to = place.get(node);
    if (from && to) drawing.append(edge(from, to, taken.has(node) ? "edge taken" : "edge"));
  }
  drawing.append(element("circle", { class: "root", cx: x(0), cy: y(0), r: 5 }));
  for (let node = 0; node < count; node += 1) {
    if (!place.has(node)) continue;
    const [depth, row] = place.get(node), kind = `slot-${slot(step.of(node))}${taken.has(node) ? " taken" : " left"}`;
    drawing.append(element("circle", { class: `node ${kind}`, cx: x(depth), cy: y(row), r: 4.5 }));
    drawing.append(element("text", { class: taken.has(node) ? "" : "left", x: x(depth) + 8, y: y(row) + 3.5 }, visible(step.texts[node] ?? "")));
  }
  if (bonus) {
    const at = [lastDepth + 1, lastLine];
    drawing.append(edge([lastDepth, lastLine], at, "edge own"), element("circle", { class: "own", cx: x(at[0]), cy: y(at[1]), r: 5 }));
  }
  return drawing;
}
