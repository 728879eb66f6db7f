// What the doctor has found: what limits the stack now, and which knob to turn.

import { arrange, element, write } from "./elements.js";
import { rate } from "./figures.js";

export class Findings {
  #list;
  #healthy;
  #shown = new Map(); // by what was found, and where

  constructor(list, healthy) {
    [this.#list, this.#healthy] = [list, healthy];
  }

  // `findings`: as /metrics/doctor tells them. One that stays is no news, though its numbers change.
  draw(findings) {
    const kept = new Map();
    for (const finding of findings) {
      const key = [finding.name, ...finding.where].join(" ");
      const shown = this.#shown.get(key) ?? new Finding();
      shown.draw(finding);
      kept.set(key, shown);
    }
    this.#shown = kept;
    arrange(this.#list, [...kept.values()].map(({ view }) => view));
    this.#healthy.hidden = findings.length > 0;
  }
}

class Finding {
  #severity = element("b");
  #what = element("span");
  #numbers = element("p", { class: "faint" });
  #knob = element("code");
  view = element(
    "li",
    { class: "finding" },
    element("p", {}, this.#severity, " ", this.#what),
    this.#numbers,
    element("p", {}, "Turn: ", this.#knob),
  );

  draw({ what, layer, layer_name: place, where, numbers, knob, severity }) {
    const told = Object.entries(numbers).map(([name, value]) => `${name.replaceAll("_", " ")} ${rate(value)}`);
    this.view.dataset.severity = severity;
    write(this.#severity, severity);
    write(this.#what, what);
    write(this.#numbers, [`${layer} ${place}`, where.join(", "), ...told].filter(Boolean).join(" · "));
    write(this.#knob, knob);
  }
}
