// One spoken message of the user: its words as they are understood, and its place in the history.

import { bubble, remove, show } from "./bubbles.js";

export class Turn {
  #text = bubble("user");
  entry = { role: "user", content: "" };

  hear(words) {
    this.#draw(this.entry.content + words);
  }

  // The text as it stays. Without a word, it was no turn.
  settle(text) {
    if (text) this.#draw(text);
    else this.drop();
  }

  drop() {
    this.entry.content = "";
    remove(this.#text);
  }

  #draw(text) {
    this.entry.content = text;
    show(() => (this.#text.textContent = text));
  }
}
