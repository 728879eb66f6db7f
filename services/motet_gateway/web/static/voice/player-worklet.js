// Runs on the audio thread: plays the page's messages {kind: push | end | stop, item, samples}.

import { JitterBuffer } from "./jitter-buffer.js";

class Player extends AudioWorkletProcessor {
  #buffer = new JitterBuffer(sampleRate, (report) => this.port.postMessage(report));

  constructor() {
    super();
    this.port.onmessage = ({ data: { kind, item, samples } }) => {
      this.#buffer[kind](item, samples);
      if (kind === "stop") this.port.postMessage({ kind: "silent" }); // after the reports of stopped items
    };
  }

  process(_, [[output]]) {
    this.#buffer.render(output);
    return true;
  }
}

registerProcessor("player", Player);
