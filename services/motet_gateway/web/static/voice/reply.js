// Tracks one spoken message of the model: played audio, caption, history entry.

import { bubble, remove, show } from "../chat/bubbles.js";
import { Caption } from "./caption.js";
import { latencyLine } from "./latency.js";

export class Reply {
  #text = bubble("assistant");
  #caption = new Caption(this.#text);
  #latency;
  entry = { role: "assistant", content: "" };
  samples = 0; // of received audio
  stopped = false; // playback was stopped
  truncated = false; // the server has truncated it
  finished = false; // the server has completed it

  // `latency`: of the answered turn, for its first message.
  constructor(latency) {
    this.#latency = latency;
    latency?.mark("textArrived");
  }

  addAudio(samples) {
    this.#latency?.mark("audioArrived");
    this.samples += samples;
  }

  // Adds words whose audio has arrived.
  addTranscript(text) {
    if (!this.stopped) this.#caption.add(text, this.samples);
  }

  // Adds words without audio.
  addText(text) {
    this.#caption.add(text, 0);
    this.#caption.markPlayed(0);
  }

  // `at`: when its first sample is output, ms.
  started(at) {
    this.#latency?.mark("audioPlayed", at);
    this.#showLatency();
  }

  // Marks as many samples as played.
  markPlayed(samples) {
    this.#caption.markPlayed(samples);
  }

  // Marks all of its audio as played.
  end() {
    this.#caption.markPlayed(Infinity);
    this.entry.content = this.#caption.text;
  }

  // Completes it with the server's `text`. Returns true if no further event can change it.
  finish(text) {
    this.finished = true;
    if (!this.samples) this.#showLatency();
    if (!this.stopped) this.entry.content = this.#caption.text;
    else if (this.truncated || !this.samples) this.truncate(text);
    return this.truncated || !this.samples;
  }

  // Truncates it to what was played: `text` from the server, or the page's estimate.
  truncate(text = this.#caption.played) {
    this.stopped = true;
    this.#caption.settle(text);
    this.entry.content = text;
    if (!text) remove(this.#text);
  }

  #showLatency() {
    if (this.#latency) show(() => this.#text.after(latencyLine(this.#latency)));
  }
}
