// Shows the words of a reply; those whose audio has not been played yet are faint.

import { show } from "../chat/bubbles.js";

export class Caption {
  #played = document.createElement("span");
  #ahead = document.createElement("span");
  #pieces = []; // {text, until: samples of the reply after which it has been spoken}

  constructor(target) {
    this.#ahead.className = "ahead";
    target.replaceChildren(this.#played, this.#ahead);
  }

  get text() {
    return this.#played.textContent + this.#ahead.textContent;
  }

  get played() {
    return this.#played.textContent;
  }

  add(text, until) {
    this.#pieces.push({ text, until });
    this.#draw();
  }

  // Marks the words of the first `played` samples as played.
  markPlayed(played) {
    if (!(this.#pieces[0]?.until <= played)) return;
    while (this.#pieces[0]?.until <= played) this.#played.append(this.#pieces.shift().text);
    this.#draw();
  }

  // Sets the final text.
  settle(text) {
    this.#pieces = [];
    this.#played.textContent = text;
    this.#draw();
  }

  #draw() {
    show(() => (this.#ahead.textContent = this.#pieces.map((piece) => piece.text).join("")));
  }
}
