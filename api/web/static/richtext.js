// A text that grows: shown as Markdown while it streams, coloured by where its tokens came from.
//
// Only the last piece of the text is rendered anew, at most once a frame and less often where that
// takes long; the pieces before it stay as they are. Colours are ranges over the nodes (the CSS
// highlights of the browser, where it has them), so they cost no element. Knows no server.

import { highlightCode, pieces, render } from "./markdown.js";

const GHOST_MS = 300, GHOST_TOKENS = 8, LOOK_AHEAD = 240, MAX_RANGES = 3000;
const canColour = typeof Highlight === "function" && Boolean(globalThis.CSS?.highlights);
const painted = new Map();  // name -> Highlight

function paint(name) {
  if (!painted.has(name)) {
    const made = new Highlight();
    painted.set(name, made);
    CSS.highlights.set(name, made);
  }
  return painted.get(name);
}

export const calm = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class RichText {
  // slot(source): which of the page's source colours (0..) is a source's; -1 = none.
  constructor(element, { slot, ongrow = () => {}, coloured = true }) {
    Object.assign(this, { element, slot, ongrow, coloured });
    this.text = "";
    this.settled = 0;        // characters whose pieces are final
    this.spans = [];         // [start, end, source], of guesses that were accepted
    this.firstSpan = 0;      // the first that reaches into the tail
    this.fresh = 0;          // where the latest step's text begins
    this.kept = [];          // ranges over settled pieces: [highlight, range]
    this.moving = [];        // ranges over the tail
    this.tail = null;
    this.frame = 0;
    this.next = 0;           // no rendering before this time
    this.ghost = null;
    this.ghostUntil = 0;
    this.over = false;
    this.open();
  }

  open() {
    this.tail = document.createElement("div");
    this.tail.className = "piece tail";
    this.tail.setAttribute("aria-live", "off");
    this.element.append(this.tail);
  }

  // The whole text at once. spans: as above.
  set(text, spans = []) {
    this.clear();
    this.text = text;
    this.spans = spans;
    this.over = true;
    this.fresh = text.length;
    this.draw();
  }

  clear() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    this.uncolour();
    this.element.replaceChildren();
    Object.assign(this, { text: "", settled: 0, spans: [], firstSpan: 0, fresh: 0, ghost: null });
    this.open();
  }

  // parts: [text, source | null] in order; rejected: texts of the guesses that were not taken.
  append(parts, rejected = []) {
    this.fresh = this.text.length;
    for (const [text, source] of parts) {
      if (!text) continue;
      const start = this.text.length;
      this.text += text;
      if (source === null) continue;
      const last = this.spans.at(-1);
      if (last && last[1] === start && last[2] === source) last[1] = this.text.length;
      else this.spans.push([start, this.text.length, source]);
    }
    if (rejected.length && !calm()) {
      this.ghost = rejected.slice(0, GHOST_TOKENS).join("").replace(/\s+/g, " ").slice(0, 60);
      this.ghostUntil = performance.now() + GHOST_MS;
      setTimeout(() => this.hideGhost(), GHOST_MS + 20);
    }
    this.wake();
  }

  finish() {
    this.over = true;
    this.ghost = null;
    this.fresh = this.text.length;
    cancelAnimationFrame(this.frame);
    this.draw();
  }

  wake() {
    if (this.frame) return;
    this.frame = requestAnimationFrame((now) => {
      this.frame = 0;
      if (now < this.next) return this.wake();
      const began = performance.now();
      this.draw();
      const took = performance.now() - began;
      this.next = took > 4 ? began + 5 * took : 0;
    });
  }

  draw() {
    this.settle();
    this.erase(this.moving);
    this.tail.replaceChildren(render(this.text.slice(this.settled)));
    const code = this.over ? highlightCode(this.tail) : null;
    this.colourAfter(code, this.tail, this.settled, this.moving, true);
    this.showGhost();
    this.ongrow();
  }

  // Pieces before the last one can't change any more.
  settle() {
    const found = pieces(this.text.slice(this.settled));
    let last = found.length - 1;
    while (last >= 0 && found[last].type === "space") last -= 1;
    let length = 0;
    for (let i = 0; i < last; i += 1) length += found[i].raw.length;
    if (!length) return;
    // marked works on the text with its line ends made uniform: count on only what is the same.
    const text = this.text.slice(this.settled, this.settled + length);
    if (found.slice(0, last).map((piece) => piece.raw).join("") !== text) return;
    const piece = document.createElement("div");
    piece.className = "piece";
    piece.append(render(text));
    this.tail.before(piece);
    this.colourAfter(highlightCode(piece), piece, this.settled, this.kept, false);
    this.settled += length;
    while (this.firstSpan < this.spans.length && this.spans[this.firstSpan][1] <= this.settled) this.firstSpan += 1;
  }

  // Highlighting code replaces its nodes: then the ranges come after it.
  colourAfter(code, root, offset, ranges, tail) {
    const from = Math.max(this.firstSpan, this.spans.length - MAX_RANGES), again = () => { if (root.isConnected) this.colour(root, offset, ranges, tail, from); };
    if (code) code.then(again);
    else this.colour(root, offset, ranges, tail, from);
  }

  // Finds the accepted spans in the rendered nodes. Markdown's own signs are in the text and not in
  // the nodes, so each shown character is looked for a little way ahead in the text.
  colour(root, offset, ranges, tail, from) {
    if (!canColour || !this.coloured || from >= this.spans.length) return;
    const text = this.text, spans = this.spans;
    let at = offset, index = from;
    const walker = document.createTreeWalker(root, NodeFilter.SHOW_TEXT, {
      acceptNode: (node) => (node.parentElement.closest(".code-head") ? NodeFilter.FILTER_REJECT : NodeFilter.FILTER_ACCEPT),
    });
    for (let node = walker.nextNode(); node; node = walker.nextNode()) {
      const shown = node.data;
      if (!shown.trim() && !node.parentElement.closest("pre")) continue;
      let begin = -1, current = -1, hot = false;
      const close = (end) => {
        while (begin >= 0 && begin < end && !shown[begin].trim()) begin += 1;
        if (begin >= 0 && begin < end) this.mark(node, begin, end, spans[current][2], hot, ranges);
        begin = -1;
      };
      for (let i = 0; i < shown.length; i += 1) {
        const found = text[at] === shown[i] ? at : text.indexOf(shown[i], at);
        if (found < 0 || found - at > LOOK_AHEAD) continue;
        while (index < spans.length && spans[index][1] <= found) index += 1;
        const inside = index < spans.length && spans[index][0] <= found;
        const isHot = tail && found >= this.fresh;
        if (begin >= 0 && (!inside || index !== current || isHot !== hot)) close(i);
        if (inside && begin < 0) { begin = i; current = index; hot = isHot; }
        at = found + 1;
      }
      close(shown.length);
    }
  }

  mark(node, start, end, source, hot, ranges) {
    const slot = this.slot(source);
    if (slot < 0) return;
    const highlight = paint(`${hot ? "hot" : "source"}-${slot}`);
    const range = new StaticRange({ startContainer: node, startOffset: start, endContainer: node, endOffset: end });
    highlight.add(range);
    ranges.push([highlight, range]);
    if (ranges === this.kept && ranges.length > MAX_RANGES) this.erase(ranges, ranges.length - MAX_RANGES);
  }

  erase(ranges, count = ranges.length) {
    for (const [highlight, range] of ranges.splice(0, count)) highlight.delete(range);
  }

  uncolour() { this.erase(this.kept); this.erase(this.moving); }

  showGhost() {
    if (this.over || this.ghost === null || performance.now() > this.ghostUntil) return;
    let place = this.tail;
    const leaf = /^(P|LI|TD|TH|H[1-6]|CODE|BLOCKQUOTE)$/;
    while (place.lastElementChild) {
      const last = place.lastElementChild;
      if (last.nextSibling?.nodeType === Node.TEXT_NODE && last.nextSibling.data.trim()) break;
      if (!leaf.test(last.nodeName) && !/^(DIV|UL|OL|TABLE|TBODY|TR|PRE)$/.test(last.nodeName)) break;
      if (last.nodeName === "CODE" && place.nodeName !== "PRE") break;
      place = last;
    }
    const ghost = document.createElement("span");
    ghost.className = "ghost";
    ghost.setAttribute("aria-hidden", "true");
    ghost.textContent = this.ghost;
    place.append(ghost);
  }

  hideGhost() {
    if (performance.now() < this.ghostUntil) return;
    this.ghost = null;
    for (const ghost of this.tail.querySelectorAll(".ghost")) ghost.remove();
    this.fresh = this.text.length;
    if (!this.frame) { this.erase(this.moving); this.colourAfter(null, this.tail, this.settled, this.moving, true); }
  }
}
