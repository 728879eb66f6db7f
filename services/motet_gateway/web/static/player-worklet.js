// On the audio thread: plays what the page sends it, {kind: push | end | stop, item, samples}.

import { JitterBuffer } from "./jitter-buffer.js";

class Player extends AudioWorkletProcessor {
  #buffer = new JitterBuffer(sampleRate, (report) => this.port.postMessage(report));

  constructor() {
    super();
    this.port.onmessage = ({ data: { kind, item, samples } }) => {
      this.#buffer[kind](item, samples);
      if (kind === "stop") this.port.postMessage({ kind: "silent" }); // after what is told of items that it cut short
    };
  }

  process(_, [[output]]) {
    this.#buffer.render(output);
    return true;
  }
}

registerProcessor("player", Player);
