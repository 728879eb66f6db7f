// The words of a reply: those that are ahead of the sound are faint until they have been heard.

import { show } from "./bubbles.js";

export class Caption {
  #heard = document.createElement("span");
  #ahead = document.createElement("span");
  #pieces = []; // {text, until: samples of the reply by which it has been said}

  constructor(target) {
    this.#ahead.className = "ahead";
    target.replaceChildren(this.#heard, this.#ahead);
  }

  get text() {
    return this.#heard.textContent + this.#ahead.textContent;
  }

  get heard() {
    return this.#heard.textContent;
  }

  add(text, until) {
    this.#pieces.push({ text, until });
    this.#draw();
  }

  // Everything said within the first `played` samples has been heard.
  hear(played) {
    if (!(this.#pieces[0]?.until <= played)) return;
    while (this.#pieces[0]?.until <= played) this.#heard.append(this.#pieces.shift().text);
    this.#draw();
  }

  // The text as it stays.
  settle(text) {
    this.#pieces = [];
    this.#heard.textContent = text;
    this.#draw();
  }

  #draw() {
    show(() => (this.#ahead.textContent = this.#pieces.map((piece) => piece.text).join("")));
  }
}
