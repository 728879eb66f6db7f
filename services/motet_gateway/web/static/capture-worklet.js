// On the audio thread: what the microphone hears, as packets of 16-bit PCM at the rate of the protocol.

import { Resampler } from "./resampler.js";

class Capture extends AudioWorkletProcessor {
  #resampler;
  #packet;
  #filled = 0;

  constructor({ processorOptions: { rate, samples } }) {
    super();
    this.#resampler = new Resampler(sampleRate, rate);
    this.#packet = new Int16Array(samples);
  }

  process([[input]]) {
    // No input while the device is silent to the browser; time goes on.
    for (const sample of this.#resampler.push(input ?? new Float32Array(128))) {
      this.#packet[this.#filled++] = Math.max(-32768, Math.min(32767, Math.round(sample * 32767)));
      if (this.#filled === this.#packet.length) this.#send();
    }
    return true;
  }

  #send() {
    const full = this.#packet;
    this.#packet = new Int16Array(full.length);
    this.#filled = 0;
    this.port.postMessage(full, [full.buffer]);
  }
}

registerProcessor("capture", Capture);
