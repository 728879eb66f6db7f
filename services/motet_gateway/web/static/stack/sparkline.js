// Draws a small curve of the latest values, without a scale; the number is beside it.

import { svg } from "../common/elements.js";

const WIDTH = 120;
const HEIGHT = 28;
const MIN_VALUES = 20; // number of values that fills the width

export class Sparkline {
  #line = svg("polyline", { fill: "none" });
  #area = svg("polygon", { stroke: "none" });
  view = svg("svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true", class: "spark" }, this.#area, this.#line);

  // `values`: the newest last; null for unknown ones.
  draw(values) {
    const slots = Math.max(values.length, MIN_VALUES);
    const highest = Math.max(...values.filter((value) => value !== null), 1e-9);
    const points = values
      .map((value, index) => [WIDTH - ((values.length - 1 - index) / (slots - 1)) * WIDTH, value])
      .filter(([, value]) => value !== null)
      .map(([x, value]) => `${x.toFixed(1)},${(HEIGHT - 2 - (value / highest) * (HEIGHT - 4)).toFixed(1)}`);
    this.#line.setAttribute("points", points.join(" "));
    const ends = points.length ? [points[0], points.at(-1)].map((point) => point.split(",")[0]) : [];
    this.#area.setAttribute("points", points.length > 1 ? `${ends[0]},${HEIGHT} ${points.join(" ")} ${ends[1]},${HEIGHT}` : "");
  }
}
