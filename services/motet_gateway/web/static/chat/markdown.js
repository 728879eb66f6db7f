// Renders a model's Markdown as DOM nodes: markdown-it without HTML, then DOMPurify. Highlighting and TeX are loaded when needed.

import "../vendor/markdown-it.min.js";
import "../vendor/purify.min.js";
import { element } from "../common/elements.js";
import { copyText } from "./clipboard.js";
import { maths } from "./maths.js";

const { markdownit, DOMPurify } = globalThis;
const HEADING_SHIFT = 1; // the page itself has h1
const MOST_HIGHLIGHTED = 50_000; // characters of a block
const KEPT = 200; // highlighted blocks
const TEX = { output: "mathml", throwOnError: false, trust: false, maxExpand: 200, maxSize: 20 };

const parser = markdownit({ html: false, linkify: true, breaks: true }).use(maths);
parser.renderer.rules.image = (tokens, index) => {
  // Pictures from elsewhere would tell that host that they were read.
  const { content, attrs } = tokens[index];
  const { escapeHtml } = parser.utils;
  return `<a href="${escapeHtml(Object.fromEntries(attrs).src)}">${escapeHtml(content || "picture")}</a>`;
};
DOMPurify.addHook("afterSanitizeAttributes", (node) => {
  if (node.tagName === "A") {
    node.setAttribute("target", "_blank");
    node.setAttribute("rel", "noopener noreferrer");
  }
});
parser.core.ruler.push("headings", ({ tokens }) => {
  for (const token of tokens) {
    if (token.type.startsWith("heading")) token.tag = `h${Math.min(6, Number(token.tag[1]) + HEADING_SHIFT)}`;
  }
});

const ALLOWED = {
  ALLOWED_TAGS: [
    "p", "br", "hr", "a", "em", "strong", "s", "code", "pre", "span", "blockquote", "ul", "ol", "li",
    "table", "thead", "tbody", "tr", "th", "td", "h1", "h2", "h3", "h4", "h5", "h6",
  ],
  ALLOWED_ATTR: ["href", "class", "start", "title"],
  RETURN_DOM_FRAGMENT: true,
};
const sanitized = (html) => DOMPurify.sanitize(html, ALLOWED);

let katex = null;
let highlighter = null;
const highlighted = new Map(); // HTML by language and code

// Returns the text as a fragment. What is still being loaded replaces its plain form later.
export function render(text) {
  const fragment = sanitized(parser.render(text));
  for (const table of fragment.querySelectorAll("table")) {
    const frame = element("div", { class: "scroll", role: "region", "aria-label": "Table", tabindex: "0" });
    table.replaceWith(frame);
    frame.append(table);
  }
  for (const pre of fragment.querySelectorAll("pre")) frameCode(pre);
  for (const span of fragment.querySelectorAll(".math")) typeset(span);
  return fragment;
}

function frameCode(pre) {
  const code = pre.querySelector("code");
  const language = /language-([\w+#-]+)/.exec(code.className)?.[1] ?? "";
  const button = element("button", { type: "button", class: "secondary small" }, "Copy code");
  button.addEventListener("click", () => copyText(code.textContent, button));
  pre.tabIndex = 0;
  const frame = element("div", { class: "code" }, element("div", { class: "code-bar" }, element("span", {}, language), button));
  pre.replaceWith(frame);
  frame.append(pre);
  if (language && code.textContent.length < MOST_HIGHLIGHTED) highlight(code, language);
}

async function highlight(code, language) {
  const text = code.textContent;
  const key = `${language}\n${text}`;
  const known = highlighted.get(key);
  if (known !== undefined) return code.replaceChildren(sanitized(known));
  highlighter ??= (await import("../vendor/highlight.min.js")).default;
  if (!highlighter.getLanguage(language)) return;
  const html = highlighter.highlight(text, { language, ignoreIllegals: true }).value;
  highlighted.set(key, html);
  if (highlighted.size > KEPT) highlighted.delete(highlighted.keys().next().value);
  code.replaceChildren(sanitized(html));
}

// KaTeX builds MathML nodes itself, so that no text becomes markup, and the page needs neither its fonts nor inline styles.
async function typeset(span) {
  if (!katex) {
    await import("../vendor/katex.min.js");
    katex = globalThis.katex;
  }
  katex.render(span.textContent, span, { ...TEX, displayMode: span.classList.contains("display") });
}
