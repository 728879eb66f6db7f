// Shows the replies of the window: a tile per figure, with its history.

import { element, setText } from "../common/elements.js";
import { count, duration, money, percent, rate } from "./figures.js";
import { Sparkline } from "./sparkline.js";

const NO_VALUE = "–";
const percentiles = (found) => (found ? `95 % within ${duration(found.p95)}, 99 % within ${duration(found.p99)}` : "no reply in this time");

// Each: name, the term for it, value and note of the latest state, and the series of its curve.
const FIGURES = [
  {
    name: "Replies",
    value: ({ replies }) => `${replies.active} now`,
    note: ({ replies }) => `${rate(replies.replies_per_second)} per second; ${replies.failed} of ${replies.replies} failed`,
    series: (history) => history.series(({ replies }) => replies.active),
  },
  {
    name: "Tokens written",
    term: "tokens that decode instances compute per second",
    value: (now, { history }) => `${rate(history.workRateOfRole("decode").at(-1) ?? 0)}/s`,
    note: ({ replies }) => `${rate(replies.tokens_per_second)}/s in finished replies`,
    series: (history) => history.workRateOfRole("decode"),
  },
  {
    name: "Wait until a reply begins",
    term: "time to first token (TTFT), median",
    value: ({ replies: { first_token_seconds: found } }) => (found ? duration(found.p50) : NO_VALUE),
    note: ({ replies }) => percentiles(replies.first_token_seconds),
    series: (history) => history.series(({ replies }) => replies.first_token_seconds?.p50 ?? null),
  },
  {
    name: "Time between two tokens",
    term: "inter-token latency (ITL), median",
    value: ({ replies: { between_tokens_seconds: found } }) => (found ? duration(found.p50) : NO_VALUE),
    note: ({ replies }) => percentiles(replies.between_tokens_seconds),
    series: (history) => history.series(({ replies }) => replies.between_tokens_seconds?.p50 ?? null),
  },
  {
    name: "Replies in time",
    term: "goodput: share of replies within the limits",
    value: ({ replies }) => (replies.good === null ? NO_VALUE : percent(replies.good)),
    note: (now, { first, between }) => `begun within ${first} s, a token every ${count(between * 1000)} ms`,
    series: (history) => history.series(({ replies }) => replies.good),
  },
  {
    name: "Cost per million tokens",
    value: ({ replies }, { price }) => costOf(price, replies.tokens_per_second),
    note: (now, { price }) => (price === null ? "set a price under Limits" : `at ${price} per hour`),
    series: (history, { price }) => history.series(({ replies }) => (price && replies.tokens_per_second ? price / replies.tokens_per_second : null)),
  },
];

const costOf = (price, perSecond) => (price === null || !perSecond ? NO_VALUE : money((price / 3600 / perSecond) * 1e6));

export class Tiles {
  #tiles;

  constructor(list) {
    this.#tiles = FIGURES.map((figure) => new Tile(figure));
    list.replaceChildren(...this.#tiles.map((tile) => tile.view));
  }

  // `limits`: {first, between, price}
  draw(history, limits) {
    for (const tile of this.#tiles) tile.draw(history, limits);
  }
}

class Tile {
  #figure;
  #value = element("strong");
  #note = element("small");
  #curve = new Sparkline();
  view;

  constructor(figure) {
    this.#figure = figure;
    this.view = element("li", { class: "tile" }, element("span", { title: figure.term ?? null }, figure.name), this.#value, this.#note, this.#curve.view);
  }

  draw(history, limits) {
    setText(this.#value, this.#figure.value(history.latest, { history, ...limits }));
    setText(this.#note, this.#figure.note(history.latest, limits));
    this.#curve.draw(this.#figure.series(history, limits));
  }
}
