// One spoken message of the model: its sound on the way to the loudspeaker, its caption, its place in the history.

import { bubble, remove, show } from "./bubbles.js";
import { Caption } from "./caption.js";
import { latencyLine } from "./latency.js";

export class Reply {
  #text = bubble("assistant");
  #caption = new Caption(this.#text);
  #latency;
  entry = { role: "assistant", content: "" };
  samples = 0; // of sound that has come
  silenced = false; // nothing more of it is to be heard
  truncated = false; // the server knows that
  whole = false; // the server has finished it

  // `latency`: of the turn that it answers, if it is the first message that does.
  constructor(latency) {
    this.#latency = latency;
    latency?.mark("written");
  }

  sound(samples) {
    this.#latency?.mark("arrived");
    this.samples += samples;
  }

  // Words whose sound has come.
  say(text) {
    if (!this.silenced) this.#caption.add(text, this.samples);
  }

  // Words without sound.
  write(text) {
    this.#caption.add(text, 0);
    this.#caption.hear(0);
  }

  // `at`: when its first sample is heard, ms.
  started(at) {
    this.#latency?.mark("played", at);
    this.#showLatency();
  }

  // As many samples have been heard.
  hear(samples) {
    this.#caption.hear(samples);
  }

  // All of its sound has been heard.
  end() {
    this.#caption.hear(Infinity);
    this.entry.content = this.#caption.text;
  }

  // The server has finished it; `text`: what it keeps of it. True if nothing more can become of it.
  complete(text) {
    this.whole = true;
    if (!this.samples) this.#showLatency();
    if (!this.silenced) this.entry.content = this.#caption.text;
    else if (this.truncated || !this.samples) this.cut(text);
    return this.truncated || !this.samples;
  }

  // It ends here: only this was heard. Without `text`, as far as the page knows.
  cut(text = this.#caption.heard) {
    this.silenced = true;
    this.#caption.settle(text);
    this.entry.content = text;
    if (!text) remove(this.#text);
  }

  #showLatency() {
    if (this.#latency) show(() => this.#text.after(latencyLine(this.#latency)));
  }
}
