// Shows one written reply while it streams and when it is restored: reasoning and tool calls folded, pictures, Markdown.

import { element, setText } from "../common/elements.js";
import { bubble, show } from "./bubbles.js";
import { Drawings } from "./drawing.js";
import { render } from "./markdown.js";

const COST = 4; // rendering may take one part in as many of the time

export class ReplyView {
  text = bubble("assistant");
  drawings = new Drawings(this.text);
  #node;
  #reasoning = null;
  #calls = [];
  #shown = "";
  #due = 0;
  #timer = 0;

  // `node`: the message, whose content, reasoning and calls may grow until `finish`.
  constructor(node) {
    this.#node = node;
    this.text.classList.add("markdown");
  }

  get article() {
    return this.text.parentElement;
  }

  // Adds a delta of the stream to the message. Returns a progress line, if it has progress.
  apply(delta) {
    const node = this.#node;
    node.content += delta.content ?? "";
    if (delta.reasoning_content) node.reasoning = (node.reasoning ?? "") + delta.reasoning_content;
    for (const call of delta.tool_calls ?? []) addCall((node.calls ??= []), call);
    return this.drawings.apply(delta);
  }

  // Draws the message soon: at most once per frame, and less often if that takes long.
  refresh() {
    this.#timer ||= setTimeout(() => requestAnimationFrame(() => this.#draw()), Math.max(0, this.#due - performance.now()));
  }

  // Draws a message that does not change any more.
  finish() {
    clearTimeout(this.#timer);
    this.#draw();
    this.drawings.discardUnfinished();
  }

  #draw() {
    this.#timer = 0;
    const began = performance.now();
    const { content, reasoning, calls = [] } = this.#node;
    show(() => {
      if (reasoning) this.#showReasoning(reasoning, !content && !calls.length);
      for (const [index, call] of calls.entries()) this.#showCall(index, call);
      if (content !== this.#shown) this.text.replaceChildren(render((this.#shown = content)));
    });
    const now = performance.now();
    this.#due = now + COST * (now - began);
  }

  #showReasoning(text, thinking) {
    if (!this.#reasoning) {
      this.#reasoning = fold("Reasoning");
      this.article.prepend(this.#reasoning);
    }
    setText(this.#reasoning.querySelector("summary"), thinking ? "Thinking…" : "Reasoning");
    setText(this.#reasoning.querySelector("pre"), text);
  }

  #showCall(index, { name, arguments: text }) {
    if (!this.#calls[index]) {
      this.#calls[index] = fold("");
      this.text.after(this.#calls[index]);
    }
    setText(this.#calls[index].querySelector("summary"), `Calls ${name}`);
    setText(this.#calls[index].querySelector("pre"), indented(text));
  }
}

function addCall(calls, { index = 0, function: { name, arguments: text } = {} }) {
  const call = (calls[index] ??= { name: "", arguments: "" });
  call.name += name ?? "";
  call.arguments += text ?? "";
}

function fold(title) {
  return element("details", { class: "fold" }, element("summary", {}, title), element("pre", { tabindex: "0" }));
}

// Returns JSON with indentation; text that is none, or not yet, as it is.
function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text;
  }
}
