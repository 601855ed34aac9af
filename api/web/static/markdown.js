// Markdown to DOM, safely: what a model says is text of a stranger.
//
// marked makes HTML, DOMPurify makes nodes of it and is the only way from text to HTML (the page's
// policy enforces it). HTML in the text is shown as text, pictures become links, links open apart
// and only lead to http, https and mailto. Nothing is ever loaded. Knows no streams.

import { Marked } from "./vendor/marked.js";
import "./vendor/purify.js";

const { DOMPurify } = globalThis;
const LONGEST_HIGHLIGHT = 60_000;  // characters; longer code stays plain

const escape = (text) =>
  text.replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;").replace(/"/g, "&quot;");

const marked = new Marked({
  gfm: true,
  breaks: true,
  renderer: {
    html: ({ text, raw }) => escape(raw ?? text),
    image: ({ href, text }) => `<a href="${escape(href ?? "")}">${escape(text || href || "picture")}</a>`,
    code: ({ text, lang }) =>
      `<pre><code class="language-${escape((lang ?? "").trim().split(/\s/)[0])}">${escape(text)}</code></pre>`,
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

const RULES = {
  ALLOWED_TAGS: ["a", "blockquote", "br", "code", "del", "em", "h1", "h2", "h3", "h4", "h5", "h6", "hr", "li", "ol",
    "p", "pre", "strong", "table", "tbody", "td", "th", "thead", "tr", "ul"],
  ALLOWED_ATTR: ["href", "class", "start", "align"],
  ALLOWED_URI_REGEXP: /^(?:https?:|mailto:)/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.nodeName === "A") {
    if (!node.hasAttribute("href")) return;
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer nofollow");
  } else if (node.hasAttribute("class")) {
    // Only the language of code, and what highlighting makes (spans can't come from a text): a class
    // of the page's own could make text look like its controls.
    const pattern = { CODE: /^language-[\w+#.-]{1,20}$/, SPAN: /^hljs-[\w ._-]{1,60}$/ }[node.nodeName];
    if (!pattern?.test(node.getAttribute("class"))) node.removeAttribute("class");
  }
});

// Top-level pieces of a Markdown text; their `raw`s put together are the text.
export const pieces = (text) => marked.lexer(text);

// A text as a fragment of safe nodes.
export function render(text) {
  let html;
  try { html = marked.parse(text); } catch { html = `<p>${escape(text)}</p>`; }
  const fragment = DOMPurify.sanitize(html, RULES);
  for (const table of fragment.querySelectorAll("table")) {
    const frame = document.createElement("div");
    frame.className = "table";
    frame.tabIndex = 0;
    frame.setAttribute("role", "region");
    frame.setAttribute("aria-label", "Table");
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  return fragment;
}

function frameCode(pre) {
  const language = /language-(\S+)/.exec(pre.firstElementChild?.className ?? "")?.[1] ?? "";
  const frame = document.createElement("div"), head = document.createElement("div");
  const name = document.createElement("span"), copy = document.createElement("button");
  frame.className = "code";
  head.className = "code-head";
  name.textContent = language;
  copy.type = "button";
  copy.className = "quiet copy-code";
  copy.textContent = "Copy";
  copy.setAttribute("aria-label", language ? `Copy this ${language} code` : "Copy this code");
  head.append(name, copy);
  pre.tabIndex = 0;
  pre.replaceWith(frame);
  frame.append(head, pre);
}

const NAMES = {
  py: "python", py3: "python", js: "javascript", mjs: "javascript", jsx: "javascript", ts: "typescript",
  tsx: "typescript", sh: "bash", zsh: "bash", console: "shell", "c++": "cpp", cc: "cpp", h: "c", hpp: "cpp",
  cs: "csharp", "c#": "csharp", html: "xml", svg: "xml", yml: "yaml", rs: "rust", golang: "go", rb: "ruby",
  md: "markdown", toml: "ini", patch: "diff", kt: "kotlin", docker: "dockerfile",
};
const KNOWN = new Set(["bash", "c", "cpp", "csharp", "css", "diff", "dockerfile", "go", "ini", "java", "javascript",
  "json", "kotlin", "lua", "markdown", "php", "python", "ruby", "rust", "shell", "sql", "swift", "typescript", "xml", "yaml"]);
const loading = new Map();

async function grammar(language) {
  const [{ default: highlight }, { default: rules }] = await Promise.all([
    import("./vendor/highlight/core.js"), import(`./vendor/highlight/${language}.js`),
  ]);
  if (!highlight.getLanguage(language)) highlight.registerLanguage(language, rules);
  return highlight;
}

// Colours the code below an element by its language. Resolves once that is done.
export function highlightCode(element) {
  const work = [];
  for (const code of element.querySelectorAll("pre > code[class]")) {
    const said = code.className.replace("language-", "").toLowerCase();
    const language = NAMES[said] ?? said;
    if (!KNOWN.has(language) || code.textContent.length > LONGEST_HIGHLIGHT) continue;
    if (!loading.has(language)) loading.set(language, grammar(language));
    work.push(loading.get(language).then((highlight) => {
      const { value } = highlight.highlight(code.textContent, { language, ignoreIllegals: true });
      code.replaceChildren(DOMPurify.sanitize(value, { ...RULES, ALLOWED_TAGS: ["span"], ALLOWED_ATTR: ["class"] }));
    }).catch(() => loading.delete(language)));
  }
  return work.length ? Promise.all(work) : null;
}
