// Draws how requests flow through the services: a picture whose edges move while there is work, and the same as a list.

import { arrange, element, setText, svg } from "../common/elements.js";
import { BOX, layOut } from "./flow-layout.js";
import { plural, rate } from "./figures.js";
import { roleWords } from "./words.js";

const WIDE = 1100; // px of room from which on services are beside one another
const BUSY = 4; // requests at a time that an edge shows as much

export class Flow {
  #view; // the figure
  #picture = svg("svg", { "aria-hidden": "true", class: "flow" });
  #list = element("ul", { class: "hidden", "aria-label": "Flow of requests" });
  #boxes = new Map(); // by role
  #edges = new Map(); // by role that is called
  #drawn = ""; // the services and the form that are laid out

  constructor(view) {
    this.#view = view;
    view.append(this.#picture, this.#list);
  }

  draw(history) {
    const services = servicesOf(history);
    this.#layOut(services);
    for (const [role, box] of this.#boxes) box.draw(services.get(role));
    for (const [role, edge] of this.#edges) drawEdge(edge, services.get(role).active);
    this.#tell(services);
  }

  // Lays out anew if a service came or left, or the room has changed.
  #layOut(services) {
    const wide = this.#view.clientWidth >= WIDE;
    const key = [wide, ...services.keys()].join(" ");
    if (key === this.#drawn) return;
    this.#drawn = key;
    const { places, edges, width, height } = layOut(services, wide);
    this.#boxes = new Map(places.map(({ role, x, y }) => [role, new Box(role, x, y)]));
    this.#edges = new Map(edges.map(({ to, path }) => [to, svg("path", { d: path, class: "edge" })]));
    for (const [name, value] of Object.entries({ viewBox: `0 0 ${width} ${height}`, width, height })) this.#picture.setAttribute(name, value);
    this.#picture.replaceChildren(...this.#edges.values(), ...[...this.#boxes.values()].map(({ view }) => view));
  }

  #tell(services) {
    const rows = [...services.values()].map((one) => `${one.role} ${roleWords(one.role)}: ${activity(one)}${one.troubled ? `; ${one.troubled}` : ""}`);
    while (this.#list.children.length < rows.length) this.#list.append(element("li"));
    arrange(this.#list, [...this.#list.children].slice(0, rows.length));
    for (const [index, text] of rows.entries()) setText(this.#list.children[index], text);
  }
}

// Returns what each service does now, by role; "clients" stands for all that send requests to the gateways.
function servicesOf(history) {
  const { instances, replies } = history.latest;
  const clients = { role: "clients", active: replies.active, work: `${rate(replies.replies_per_second)} replies/s`, troubled: "", count: 0 };
  const byRole = Map.groupBy(instances, ({ role }) => role);
  const services = [...byRole].map(([role, all]) => [role, serviceOf(role, all, history)]);
  const gateway = services.find(([role]) => role === "gateway")?.[1];
  if (gateway) gateway.active = Math.max(gateway.active, replies.active); // streams to clients are no calls of the bus
  return new Map([["clients", clients], ...services]);
}

function serviceOf(role, all, history) {
  const active = all.reduce((sum, { load }) => sum + (load.active ?? load.running ?? 0), 0);
  const done = history.workRateOfRole(role).at(-1);
  const unit = all.find(({ work }) => work)?.work.unit;
  const unready = all.find(({ state }) => state !== "ready");
  return { role, active, work: done ? `${rate(done)} ${unit}` : "", troubled: unready?.state ?? "", count: all.length };
}

function activity({ active, work }) {
  const parts = [active ? plural(active, "request") : "", work];
  return parts.filter(Boolean).join(" · ") || "idle";
}

function drawEdge(edge, active) {
  edge.classList.toggle("live", active > 0);
  edge.style.strokeWidth = `${1.5 + 2.5 * Math.min(active / BUSY, 1)}px`;
}

class Box {
  #frame = svg("rect", { width: BOX.width, height: BOX.height, rx: 10 });
  #count = svg("tspan", { class: "count" });
  #activity = svg("text", { x: 12, y: 53, class: "activity" });
  view;

  constructor(role, x, y) {
    const name = svg("text", { x: 12, y: 20, class: "name" }, role, this.#count);
    const words = svg("text", { x: 12, y: 37, class: "words" }, roleWords(role));
    this.view = svg("g", { class: "box", transform: `translate(${x} ${y})`, "data-role": role }, this.#frame, name, words, this.#activity);
  }

  draw(service) {
    const { active, troubled, count } = service;
    this.view.classList.toggle("live", active > 0);
    this.view.classList.toggle("troubled", Boolean(troubled));
    setText(this.#count, count > 1 ? ` × ${count}` : "");
    setText(this.#activity, troubled || activity(service));
  }
}
