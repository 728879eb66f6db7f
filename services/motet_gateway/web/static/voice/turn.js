// Tracks one spoken message of the user: its transcript and history entry.

import { bubble, remove, show } from "../chat/bubbles.js";

export class Turn {
  #text = bubble("user");
  entry = { role: "user", content: "" };

  append(words) {
    this.#draw(this.entry.content + words);
  }

  // Sets the final transcript; an empty one removes the turn.
  finish(text) {
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
