// Lists the latest replies; each opens its trace, a waterfall.

import { arrange, element, setText } from "../common/elements.js";
import { duration, plural } from "./figures.js";
import { waterfall } from "./waterfall.js";
import { statusWords } from "./words.js";

const MAX_SHOWN = 20;
let panels = 0; // number of panels, for their ids

export class Replies {
  #list;
  #empty;
  #rows = new Map(); // by reply

  constructor(list, none) {
    [this.#list, this.#empty] = [list, none];
  }

  // `order`: "newest" or "slowest"; `wanted`: a request whose reply is shown in any case. Open replies stay as long as the server
  // keeps them.
  draw(replies, order, wanted) {
    const keyed = new Map(replies.map((reply) => [`${reply.ended} ${reply.request}`, reply]));
    for (const key of this.#rows.keys()) if (!keyed.has(key)) this.#rows.delete(key);
    const ordered = [...keyed].sort(([, a], [, b]) => (order === "slowest" ? b.total - a.total : b.ended - a.ended));
    const visible = ordered.filter(([key, { request }], index) => index < MAX_SHOWN || request === wanted || this.#rows.get(key)?.open);
    const longest = Math.max(...visible.map(([, reply]) => reply.total));
    for (const [key, reply] of visible) {
      if (!this.#rows.has(key)) this.#rows.set(key, new Row(reply));
      this.#rows.get(key).scale(longest);
    }
    arrange(this.#list, visible.map(([key]) => this.#rows.get(key).view));
    this.#empty.hidden = visible.length > 0;
  }

  // Opens the reply to a request and moves the focus there. Returns whether it is listed.
  open(request) {
    const row = [...this.#rows.values()].find((one) => one.request === request);
    row?.reveal();
    return Boolean(row);
  }
}

class Row {
  #reply;
  #button;
  #panel;
  #bar = element("i");
  view;

  constructor(reply) {
    this.#reply = reply;
    const id = `waterfall-${(panels += 1)}`;
    this.#panel = element("div", { id, class: "panel-below", hidden: "" });
    const track = element("span", { class: "length", "aria-hidden": "true" }, this.#bar);
    this.#button = element("button", { type: "button", class: "reply", "aria-expanded": "false", "aria-controls": id }, ...summaryParts(reply), track);
    this.#button.addEventListener("click", () => this.#toggle());
    this.view = element("li", {}, this.#button, this.#panel);
  }

  get open() {
    return !this.#panel.hidden;
  }

  get request() {
    return this.#reply.request;
  }

  reveal() {
    if (!this.open) this.#toggle();
    this.#button.focus({ preventScroll: true });
    this.view.scrollIntoView({ block: "center" });
  }

  // Draws its duration relative to the longest, with the first token in it.
  scale(longest) {
    const { first, total } = this.#reply;
    this.#bar.style.width = `${(100 * total) / longest}%`;
    this.#bar.style.setProperty("--first", `${(100 * (first ?? total)) / total}%`);
  }

  #toggle() {
    if (!this.#panel.firstChild) this.#panel.append(waterfall(this.#reply));
    this.#panel.hidden = this.open;
    this.#button.setAttribute("aria-expanded", String(this.open));
  }
}

function summaryParts({ ended, model, status, tokens, first, total }) {
  const time = new Date(ended * 1000).toLocaleTimeString();
  const state = element("b", { class: "state", "data-state": status }, statusWords(status));
  const text = [["time", time], ["model", model], ["", plural(tokens, "token")]];
  text.push(["", first === null ? "no token" : `began after ${duration(first)}`], ["", `took ${duration(total)}`]);
  return [state, ...text.map(([kind, text]) => element("span", { class: kind }, text))];
}
