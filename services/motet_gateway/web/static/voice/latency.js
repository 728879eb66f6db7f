// Measures a turn from the end of speech to the first audio of the reply, by stage.

import { element } from "../common/elements.js";

const STAGES = {
  speechEnded: "pause", // the silence that ends the turn
  transcribed: "transcript",
  textArrived: "first text",
  audioArrived: "first sound",
  audioPlayed: "playback",
};

export class Latency {
  #begin;
  #at = {};

  // `begin`: when the user stopped speaking or sent a text; ms, as all times.
  constructor(begin) {
    this.#begin = begin;
  }

  // Marks the end of a stage; only the first call counts.
  mark(stage, at = performance.now()) {
    this.#at[stage] ??= at;
  }

  // Returns {name, ms} of the ended stages. A stage that ended before an earlier one counts as 0 ms.
  get stages() {
    let before = this.#begin;
    return Object.entries(STAGES)
      .filter(([stage]) => stage in this.#at)
      .map(([stage, name]) => {
        const end = Math.max(before, this.#at[stage]);
        const ms = Math.round(end - before);
        before = end;
        return { name, ms };
      });
  }
}

// Shows the stages' times below a bar of their shares.
export function latencyLine(latency) {
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const figures = element("dl");
  let total = 0;
  for (const { name, ms } of latency.stages) {
    const share = element("i");
    share.style.flexGrow = ms;
    bar.append(share);
    figures.append(figure(name, ms));
    total += ms;
  }
  figures.append(figure("total", total));
  return element("div", { class: "latency", role: "group", "aria-label": "Latency of this turn" }, bar, figures);
}

function figure(name, ms) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, `${ms} ms`));
}
