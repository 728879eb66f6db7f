// Shows the doctor's findings: what slows replies down, where, and what would change it.

import { arrange, element, setText } from "../common/elements.js";
import { rate } from "./figures.js";
import { layerWords, severityWords } from "./words.js";

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
  #place = element("p", { class: "faint" });
  #numbers = element("p");
  #knob = element("code");
  view = element(
    "li",
    { class: "finding" },
    element("p", {}, this.#what, " ", this.#severity),
    this.#place,
    element("p", {}, "Suggested change: ", this.#knob),
    element("details", { class: "fold" }, element("summary", {}, "Figures"), this.#numbers),
  );

  draw({ what, layer, layer_name: place, where, numbers, knob, severity }) {
    const figures = Object.entries(numbers).map(([name, value]) => `${name.replaceAll("_", " ")} ${rate(value)}`);
    this.view.dataset.severity = severity;
    setText(this.#severity, severityWords(severity));
    setText(this.#what, what);
    setText(this.#place, [`In ${layerWords(place)}`, where.join(", ")].filter(Boolean).join(": "));
    setText(this.#numbers, [`layer ${layer} (${place})`, ...figures].join(" · "));
    setText(this.#knob, knob);
  }
}
