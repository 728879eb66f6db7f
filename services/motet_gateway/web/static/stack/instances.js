// Shows the instances of every service, in the order of a request's path.

import { arrange, element, setText } from "../common/elements.js";
import { count, percent, plural, rate } from "./figures.js";
import { Sparkline } from "./sparkline.js";
import { roleWords } from "./words.js";

const ORDER = ["gateway", "tokenizer", "prefill", "decode", "encoder", "vad", "asr", "speakers", "tts", "diffusion", "embedding", "ranking", "planner"];
const MAX_CARDS = 120; // per service

export class Instances {
  #view;
  #services = new Map(); // by role

  constructor(view) {
    this.#view = view;
  }

  draw(history) {
    const byRole = Map.groupBy(history.latest.instances, ({ role }) => role);
    const roles = [...byRole.keys()].sort((a, b) => place(a) - place(b) || a.localeCompare(b));
    for (const role of this.#services.keys()) if (!byRole.has(role)) this.#services.delete(role);
    for (const role of roles) {
      if (!this.#services.has(role)) this.#services.set(role, new Service(role));
      this.#services.get(role).draw(byRole.get(role), history);
    }
    arrange(this.#view, roles.map((role) => this.#services.get(role).view));
  }
}

const place = (role) => (ORDER.indexOf(role) + 1 || ORDER.length + 1);

class Service {
  #title = element("h4");
  #text = element("span", { class: "faint" });
  #list = element("ul", { class: "cards" });
  #cards = new Map(); // by instance
  #role;
  view;

  constructor(role) {
    this.#role = role;
    this.#title.textContent = role;
    this.#title.id = `service-${role}`;
    this.view = element("section", { class: "service", "aria-labelledby": this.#title.id }, element("header", {}, this.#title, this.#text), this.#list);
  }

  draw(instances, history) {
    const shown = instances.slice(0, MAX_CARDS);
    const hidden = instances.length - shown.length;
    const number = plural(instances.length, "instance") + (hidden ? `, ${hidden} of them not shown` : "");
    setText(this.#text, [roleWords(this.#role), number].filter(Boolean).join("; "));
    const names = new Set(shown.map(({ instance }) => instance));
    for (const name of this.#cards.keys()) if (!names.has(name)) this.#cards.delete(name);
    for (const one of shown) {
      if (!this.#cards.has(one.instance)) this.#cards.set(one.instance, new Card(one));
      this.#cards.get(one.instance).draw(one, history);
    }
    arrange(this.#list, shown.map(({ instance }) => this.#cards.get(instance).view));
  }
}

// Rows of a card: name and text; null for an instance without such a value.
const orNull = (value, text) => (value === undefined || value === null ? null : text(value));
const ROWS = [
  ["running", ({ load }) => orNull(load.running ?? load.active, count)],
  ["queued", ({ load }) => orNull(load.queued, count)],
  ["batch", ({ load }) => orNull(load.batch, count)],
  ["work", ({ instance, work }, history) => orNull(history.workRate(instance), (done) => `${rate(done)} ${work.unit}`)],
  ["cores", ({ instance }, history) => orNull(history.coresInUse(instance), rate)],
];

class Card {
  #state = element("b", { class: "state" });
  #models = element("p", { class: "faint" });
  #rows = new Map(); // elements by name
  #list = element("dl");
  #meter = new Meter("KV cache used");
  #curve = new Sparkline();
  view;

  constructor({ role, instance, host, pid }) {
    const name = element("span", { class: "name", title: `process ${pid} on ${host}` }, instance.replace(`${role}-`, ""));
    this.view = element("li", { class: "card" }, element("p", { class: "head" }, name, this.#state), this.#models, this.#meter.view, this.#list, this.#curve.view);
  }

  draw(one, history) {
    this.#state.dataset.state = one.state;
    setText(this.#state, one.state);
    setText(this.#models, one.models.join(", "));
    this.#models.hidden = !one.models.length;
    this.#meter.draw(one.load.kv_free === undefined ? null : 1 - one.load.kv_free);
    for (const [name, read] of ROWS) this.#setRow(name, read(one, history));
    const active = (sample) => orNull(sample.byName.get(one.instance), ({ load }) => load.running ?? load.active ?? null);
    this.#curve.draw(history.series(active));
  }

  #setRow(name, text) {
    let row = this.#rows.get(name);
    if (!row && text === null) return;
    if (!row) {
      row = element("dd");
      this.#rows.set(name, row);
      this.#list.append(element("div", {}, element("dt", {}, name), row));
    }
    setText(row, text ?? "–");
  }
}

// Shows a share as a gauge.
class Meter {
  #bar = element("i");
  #text = element("span", { class: "faint" });
  #gauge;
  #name;
  view;

  constructor(name) {
    this.#name = name;
    this.#gauge = element("div", { class: "gauge", role: "meter", "aria-label": name, "aria-valuemin": "0", "aria-valuemax": "100" }, this.#bar);
    this.view = element("div", { class: "meter", hidden: "" }, this.#gauge, this.#text);
  }

  // `share`: 0 to 1; null hides it.
  draw(share) {
    this.view.hidden = share === null;
    if (share === null) return;
    this.#bar.style.width = `${100 * share}%`;
    this.#bar.classList.toggle("full", share > 0.9);
    this.#gauge.setAttribute("aria-valuenow", Math.round(100 * share));
    setText(this.#text, `${percent(share)} of the KV cache`);
    this.#gauge.setAttribute("aria-valuetext", `${percent(share)}`);
  }
}
