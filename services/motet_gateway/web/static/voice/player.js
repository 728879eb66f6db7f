// Plays the audio of conversation items as it arrives, and reports the played samples of each.

import { RATE } from "./microphone.js";

export class Player {
  #context;
  #node;
  analyser;

  // `report` gets the JitterBuffer's reports.
  static async open(report) {
    const player = new Player();
    const context = (player.#context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" }));
    await context.audioWorklet.addModule("voice/player-worklet.js");
    player.#node = new AudioWorkletNode(context, "player", { numberOfInputs: 0, outputChannelCount: [1] });
    player.#node.port.onmessage = ({ data }) => report(data);
    player.analyser = context.createAnalyser();
    player.#node.connect(player.analyser).connect(context.destination);
    context.resume();
    return player;
  }

  // Returns the seconds between rendering and output of a sample.
  get latency() {
    return this.#context.outputLatency || this.#context.baseLatency || 0;
  }

  // Appends audio of an item (Int16Array, transferred).
  push(item, samples) {
    this.#node.port.postMessage({ kind: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.#node.port.postMessage({ kind: "end", item });
  }

  // Stops playback. A report `stopped` follows for each unfinished item, then `silent`.
  stop() {
    this.#node.port.postMessage({ kind: "stop" });
  }

  close() {
    this.#context.close();
  }
}
