// Shows the doctor's findings: bottlenecks and their remedies.

import { arrange, element, setText } from "../common/elements.js";
import { rate } from "./figures.js";

export class Findings {
  #list;
  #none;
  #shown = new Map(); // by name and instances

  constructor(list, none) {
    [this.#list, this.#none] = [list, none];
  }

  // `findings`: of /metrics/doctor. A finding that remains keeps its element, though its numbers change.
  draw(findings) {
    const rows = new Map();
    for (const finding of findings) {
      const key = [finding.name, ...finding.where].join(" ");
      const shown = this.#shown.get(key) ?? new Finding();
      shown.draw(finding);
      rows.set(key, shown);
    }
    this.#shown = rows;
    arrange(this.#list, [...rows.values()].map(({ view }) => view));
    this.#none.hidden = findings.length > 0;
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
    element("p", {}, "Remedy: ", this.#knob),
  );

  draw({ what, layer, layer_name: place, where, numbers, knob, severity }) {
    const figures = Object.entries(numbers).map(([name, value]) => `${name.replaceAll("_", " ")} ${rate(value)}`);
    this.view.dataset.severity = severity;
    setText(this.#severity, severity);
    setText(this.#what, what);
    setText(this.#numbers, [`${layer} ${place}`, where.join(", "), ...figures].filter(Boolean).join(" · "));
    setText(this.#knob, knob);
  }
}
