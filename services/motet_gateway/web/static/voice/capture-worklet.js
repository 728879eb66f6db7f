// Runs on the audio thread: sends the microphone's audio as packets of 16-bit PCM at the protocol's rate.

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
    // Without input from the device, silence keeps the time.
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
