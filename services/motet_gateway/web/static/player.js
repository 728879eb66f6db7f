// The loudspeaker: plays the sound of items of a conversation as it arrives, and tells what was heard of each.

import { RATE } from "./microphone.js";

export class Player {
  #context;
  #node;
  analyser;

  // `report` gets what a JitterBuffer reports.
  static async open(report) {
    const player = new Player();
    const context = (player.#context = new AudioContext({ sampleRate: RATE, latencyHint: "interactive" }));
    await context.audioWorklet.addModule("player-worklet.js");
    player.#node = new AudioWorkletNode(context, "player", { numberOfInputs: 0, outputChannelCount: [1] });
    player.#node.port.onmessage = ({ data }) => report(data);
    player.analyser = context.createAnalyser();
    player.#node.connect(player.analyser).connect(context.destination);
    context.resume();
    return player;
  }

  // Seconds from a sample's rendering to its being heard.
  get latency() {
    return this.#context.outputLatency || this.#context.baseLatency || 0;
  }

  // More sound (Int16Array, which is given away) of an item.
  push(item, samples) {
    this.#node.port.postMessage({ kind: "push", item, samples }, [samples.buffer]);
  }

  end(item) {
    this.#node.port.postMessage({ kind: "end", item });
  }

  // Silence at once; a report `stopped` tells what was heard of each item that was under way, then comes `silent`.
  stop() {
    this.#node.port.postMessage({ kind: "stop" });
  }

  close() {
    this.#context.close();
  }
}
