// How the replies of the window were: a tile for each figure, with the way it has taken.

import { element, write } from "./elements.js";
import { count, duration, money, percent, rate } from "./figures.js";
import { Sparkline } from "./sparkline.js";

const NOTHING = "–";
const tail = (found) => (found ? `p95 ${duration(found.p95)} · p99 ${duration(found.p99)}` : "no reply in this time");

// Each: name, value and note of the newest look, and the series of its curve.
const FIGURES = [
  {
    name: "Replies",
    value: ({ replies }) => `${replies.active} now`,
    note: ({ replies }) => `${rate(replies.replies_per_second)}/s · ${replies.failed} of ${replies.replies} failed`,
    series: (looks) => looks.series(({ replies }) => replies.active),
  },
  {
    name: "Tokens computed",
    value: (now, { looks }) => `${rate(looks.workOf("decode").at(-1) ?? 0)}/s`,
    note: ({ replies }) => `${rate(replies.tokens_per_second)}/s in replies`,
    series: (looks) => looks.workOf("decode"),
  },
  {
    name: "First token",
    value: ({ replies: { first_token_seconds: found } }) => (found ? duration(found.p50) : NOTHING),
    note: ({ replies }) => tail(replies.first_token_seconds),
    series: (looks) => looks.series(({ replies }) => replies.first_token_seconds?.p50 ?? null),
  },
  {
    name: "Between tokens",
    value: ({ replies: { between_tokens_seconds: found } }) => (found ? duration(found.p50) : NOTHING),
    note: ({ replies }) => tail(replies.between_tokens_seconds),
    series: (looks) => looks.series(({ replies }) => replies.between_tokens_seconds?.p50 ?? null),
  },
  {
    name: "Good replies",
    value: ({ replies }) => (replies.good === null ? NOTHING : percent(replies.good)),
    note: (now, { first, between }) => `begin in ${first} s, go on in ${count(between * 1000)} ms`,
    series: (looks) => looks.series(({ replies }) => replies.good),
  },
  {
    name: "A million tokens",
    value: ({ replies }, { price }) => costOf(price, replies.tokens_per_second),
    note: (now, { price }) => (price === null ? "give a price under Limits" : `at ${price} per hour`),
    series: (looks, { price }) => looks.series(({ replies }) => (price && replies.tokens_per_second ? price / replies.tokens_per_second : null)),
  },
];

const costOf = (price, perSecond) => (price === null || !perSecond ? NOTHING : money((price / 3600 / perSecond) * 1e6));

export class Tiles {
  #tiles;

  constructor(list) {
    this.#tiles = FIGURES.map((figure) => new Tile(figure));
    list.replaceChildren(...this.#tiles.map((tile) => tile.view));
  }

  // `limits`: {first, between, price}
  draw(looks, limits) {
    for (const tile of this.#tiles) tile.draw(looks, limits);
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
    this.view = element("li", { class: "tile" }, element("span", {}, figure.name), this.#value, this.#note, this.#curve.view);
  }

  draw(looks, limits) {
    write(this.#value, this.#figure.value(looks.now, { looks, ...limits }));
    write(this.#note, this.#figure.note(looks.now, limits));
    this.#curve.draw(this.#figure.series(looks, limits));
  }
}
