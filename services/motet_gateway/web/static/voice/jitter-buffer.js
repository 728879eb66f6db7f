// Plays audio that arrives in pieces: buffers before it starts, and longer after each underrun. Fades avoid clicks.

const INITIAL_DELAY = 0.08; // seconds buffered before playback
const MAX_DELAY = 1; // seconds, after any number of underruns
const FADE = 0.005; // seconds of fade in and out
const DECAY = 0.97; // per sample: decay of the last value without further audio
const REPORT = 0.04; // seconds between reports of progress

export class JitterBuffer {
  #rate;
  #report;
  #ring;
  #read = 0; // samples since the start, as all positions
  #written = 0;
  #items = []; // {id, from, until: null while open, begun, smooth: without underrun} in order; the first is playing
  #playing = false;
  #target;
  #gain = 0;
  #last = 0;
  #fading = []; // samples that fade out after a stop, reversed
  #reported = 0;

  // `report` gets {kind, item, played}; kind: started, progress, underrun, ended, stopped; played: samples of that item.
  constructor(rate, report) {
    this.#rate = rate;
    this.#report = report;
    this.#target = INITIAL_DELAY * rate;
    this.#ring = new Int16Array(2 ** Math.ceil(Math.log2(10 * rate)));
  }

  get buffered() {
    return this.#written - this.#read;
  }

  // Appends audio (Int16Array) of an item.
  push(id, samples) {
    if (this.#items.at(-1)?.id !== id) {
      this.end(this.#items.at(-1)?.id);
      this.#items.push({ id, from: this.#written, until: null, begun: false, smooth: true });
    }
    while (this.buffered + samples.length > this.#ring.length) this.#grow();
    const at = this.#written % this.#ring.length;
    const room = this.#ring.length - at;
    this.#ring.set(samples.subarray(0, room), at);
    this.#ring.set(samples.subarray(room), 0);
    this.#written += samples.length;
  }

  // Marks an item as complete.
  end(id) {
    const item = this.#items.find((one) => one.id === id);
    if (item) item.until ??= this.#written;
  }

  // Fades out and discards unplayed audio.
  stop() {
    this.#fadeOut();
    for (const item of this.#items) this.#reportItem("stopped", item);
    this.#read = this.#written;
    this.#items = [];
  }

  // Renders the next samples into `output` (Float32Array).
  render(output) {
    const [item] = this.#items;
    if (this.buffered > 0 && (this.buffered >= this.#target || item.until !== null)) this.#playing = true;
    for (let i = 0; i < output.length; i++) output[i] = this.#next() + (this.#fading.pop() ?? 0);
    this.#reportProgress();
  }

  #next() {
    if (this.#playing && this.#read === this.#written) this.#underrun();
    if (!this.#playing) return (this.#last *= DECAY);
    this.#gain = Math.min(1, this.#gain + 1 / (FADE * this.#rate));
    return (this.#last = this.#gain * this.#sample(this.#read++));
  }

  #underrun() {
    this.#playing = false;
    this.#gain = 0;
    const item = this.#items.at(-1);
    if (item?.until !== null) return; // the item is complete
    item.smooth = false;
    this.#target = Math.min(2 * this.#target, MAX_DELAY * this.#rate);
    this.#reportItem("underrun", item);
  }

  #reportProgress() {
    for (let item; (item = this.#items[0]); this.#items.shift()) {
      if (!item.begun && this.#read > item.from) {
        item.begun = true;
        this.#reportItem("started", item);
      }
      if (item.until === null || this.#read < item.until) break;
      if (item.smooth) this.#target = Math.max(0.8 * this.#target, INITIAL_DELAY * this.#rate);
      this.#reportItem("ended", item);
    }
    if (this.#items.length && this.#read - this.#reported >= REPORT * this.#rate) this.#reportItem("progress", this.#items[0]);
  }

  #reportItem(kind, item) {
    this.#reported = this.#read;
    const end = item.until ?? this.#written;
    this.#report({ kind, item: item.id, played: Math.max(0, Math.min(this.#read, end) - item.from) });
  }

  #fadeOut() {
    if (Math.abs(this.#last) < 1e-4 && !this.#playing) return;
    const length = Math.round(FADE * this.#rate);
    this.#fading = Array.from({ length }, (_, i) => {
      const more = this.#playing && this.#read + i < this.#written;
      this.#last = more ? this.#gain * this.#sample(this.#read + i) : this.#last * DECAY;
      return this.#last * (1 - i / length);
    }).reverse();
    this.#playing = false;
    this.#last = this.#gain = 0;
  }

  #sample(position) {
    return this.#ring[position % this.#ring.length] / 32768;
  }

  #grow() {
    const larger = new Int16Array(2 * this.#ring.length);
    for (let at = this.#read; at < this.#written; at++) larger[at % larger.length] = this.#ring[at % this.#ring.length];
    this.#ring = larger;
  }
}
