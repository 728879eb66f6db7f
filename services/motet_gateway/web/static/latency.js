// How long a turn took from its end to the first sound of the reply, by stage.

import { element } from "./elements.js";

const STAGES = {
  ended: "pause", // the silence that shows that the user has finished
  understood: "transcript",
  written: "first text",
  arrived: "first sound",
  played: "playback",
};

export class Latency {
  #begin;
  #at = {};

  // `begin`: when the user stopped speaking, or sent a text; ms, like all times here.
  constructor(begin) {
    this.#begin = begin;
  }

  // A stage is over; only the first time counts.
  mark(stage, at = performance.now()) {
    this.#at[stage] ??= at;
  }

  // {name, ms} of the stages that are over. One that ended while an earlier one still ran took no time of its own.
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

// The figures, below a bar that shows their shares.
export function latencyLine(latency) {
  const bar = element("div", { class: "bar", "aria-hidden": "true" });
  const figures = element("dl");
  let whole = 0;
  for (const { name, ms } of latency.stages) {
    const share = element("i");
    share.style.flexGrow = ms;
    bar.append(share);
    figures.append(figure(name, ms));
    whole += ms;
  }
  figures.append(figure("in all", whole));
  return element("div", { class: "latency", role: "group", "aria-label": "Latency of this turn" }, bar, figures);
}

function figure(name, ms) {
  return element("div", {}, element("dt", {}, name), element("dd", {}, `${ms} ms`));
}
