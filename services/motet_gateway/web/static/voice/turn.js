// Tracks one spoken message of the user: its transcript, or its sound where nothing transcribes it, and its history entry.

import { bubble, remove, show } from "../chat/bubbles.js";
import { attachedFile } from "../chat/message-view.js";

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

  // Sets the sound of a turn that has no transcript, as a data URI.
  keep(url) {
    const file = { kind: "sound", name: "What you said", url, text: "", spoken: true };
    this.entry.files = [file];
    show(() => this.#text.before(attachedFile(file)));
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
