// Keeps the sound of the user's turns that nothing transcribes: as WAV, so that the conversation can be heard and continued.

import { RATE } from "./microphone.js";
import { toBase64 } from "./realtime.js";

const HEADER = 44; // bytes of a WAV file before its samples
const BEFORE = 3 * RATE; // samples kept while nobody speaks: the server tells of speech after it has begun
const MOST = 120 * RATE; // samples of a turn; the oldest of a longer one are dropped

export class Recording {
  #packets = []; // the last ones
  #start = 0; // position of the first of them, in samples
  #length = 0; // samples of them together
  #from = null; // where the turn begins; null while nobody speaks
  #to = null; // where it ends; null until that is known

  add(packet) {
    this.#packets.push(packet);
    this.#length += packet.length;
    this.#drop(this.#start + this.#length - (this.#from === null ? BEFORE : MOST));
  }

  begin(position) {
    [this.#from, this.#to] = [position, null];
  }

  end(position) {
    this.#to = position;
  }

  // Returns the sound of the turn as a data URI.
  take() {
    const samples = new Int16Array(this.#length);
    let at = 0;
    for (const packet of this.#packets) {
      samples.set(packet, at);
      at += packet.length;
    }
    const turn = samples.slice(Math.max(0, (this.#from ?? this.#start) - this.#start), (this.#to ?? Infinity) - this.#start);
    this.#from = this.#to = null;
    return `data:audio/wav;base64,${toBase64(wav(turn))}`;
  }

  // Drops the packets before a position.
  #drop(position) {
    while (this.#packets.length && this.#start + this.#packets[0].length <= position) {
      const { length } = this.#packets.shift();
      this.#start += length;
      this.#length -= length;
    }
  }
}

// Returns the samples of a recording, in base64, as the realtime protocol takes them.
export function soundOf(uri) {
  return btoa(atob(uri.split(",", 2)[1]).slice(HEADER));
}

function wav(samples) {
  const file = new Int16Array(HEADER / 2 + samples.length);
  const view = new DataView(file.buffer);
  const texts = [[0, "RIFF"], [8, "WAVE"], [12, "fmt "], [36, "data"]];
  for (const [at, text] of texts) for (const [index, char] of [...text].entries()) view.setUint8(at + index, char.charCodeAt(0));
  view.setUint32(4, file.byteLength - 8, true);
  view.setUint32(16, 16, true); // bytes of the format
  view.setUint16(20, 1, true); // PCM
  view.setUint16(22, 1, true); // channels
  view.setUint32(24, RATE, true);
  view.setUint32(28, 2 * RATE, true); // bytes a second
  view.setUint16(32, 2, true); // bytes a sample
  view.setUint16(34, 16, true); // bits of a sample
  view.setUint32(40, 2 * samples.length, true);
  file.set(samples, HEADER / 2);
  return file;
}
