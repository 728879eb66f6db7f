// Sound that arrives in pieces, played without gaps: waits until enough is there, and for more each time that it runs
// dry. Silence never begins or ends with a click.

const FIRST = 0.08; // seconds of sound before it begins
const MOST = 1; // seconds, however often it ran dry
const FADE = 0.005; // seconds to full volume, or to none
const GLIDE = 0.97; // per sample: how what was heard last dies away where nothing follows
const REPORT = 0.04; // seconds between reports of progress

export class JitterBuffer {
  #rate;
  #report;
  #ring;
  #read = 0; // samples since the beginning, like all positions here
  #written = 0;
  #items = []; // {id, from, until: null while more may come, begun, smooth} in order; the first is being played
  #flowing = false;
  #target;
  #gain = 0;
  #last = 0;
  #tail = []; // what fades after a stop
  #told = 0;

  // `report` gets {kind, item, played}; kind: started, progress, dry, ended, stopped; played: samples of that item.
  constructor(rate, report) {
    this.#rate = rate;
    this.#report = report;
    this.#target = FIRST * rate;
    this.#ring = new Int16Array(2 ** Math.ceil(Math.log2(10 * rate)));
  }

  get buffered() {
    return this.#written - this.#read;
  }

  // More sound (Int16Array) of an item.
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

  // Nothing more will come of this item.
  end(id) {
    const item = this.#items.find((one) => one.id === id);
    if (item) item.until ??= this.#written;
  }

  // Falls silent within FADE and forgets what was not played.
  stop() {
    this.#fadeOut();
    for (const item of this.#items) this.#tell("stopped", item);
    this.#read = this.#written;
    this.#items = [];
  }

  // Fills `output` (Float32Array) with what is to be heard next.
  render(output) {
    const [item] = this.#items;
    if (this.buffered > 0 && (this.buffered >= this.#target || item.until !== null)) this.#flowing = true;
    for (let i = 0; i < output.length; i++) output[i] = this.#next() + (this.#tail.pop() ?? 0);
    this.#tellProgress();
  }

  #next() {
    if (this.#flowing && this.#read === this.#written) this.#runDry();
    if (!this.#flowing) return (this.#last *= GLIDE);
    this.#gain = Math.min(1, this.#gain + 1 / (FADE * this.#rate));
    return (this.#last = this.#gain * this.#sample(this.#read++));
  }

  #runDry() {
    this.#flowing = false;
    this.#gain = 0;
    const item = this.#items.at(-1);
    if (item?.until !== null) return; // nothing more was to come
    item.smooth = false;
    this.#target = Math.min(2 * this.#target, MOST * this.#rate);
    this.#tell("dry", item);
  }

  #tellProgress() {
    for (let item; (item = this.#items[0]); this.#items.shift()) {
      if (!item.begun && this.#read > item.from) {
        item.begun = true;
        this.#tell("started", item);
      }
      if (item.until === null || this.#read < item.until) break;
      if (item.smooth) this.#target = Math.max(0.8 * this.#target, FIRST * this.#rate);
      this.#tell("ended", item);
    }
    if (this.#items.length && this.#read - this.#told >= REPORT * this.#rate) this.#tell("progress", this.#items[0]);
  }

  #tell(kind, item) {
    this.#told = this.#read;
    const end = item.until ?? this.#written;
    this.#report({ kind, item: item.id, played: Math.max(0, Math.min(this.#read, end) - item.from) });
  }

  #fadeOut() {
    if (Math.abs(this.#last) < 1e-4 && !this.#flowing) return;
    const length = Math.round(FADE * this.#rate);
    this.#tail = Array.from({ length }, (_, i) => {
      const more = this.#flowing && this.#read + i < this.#written;
      this.#last = more ? this.#gain * this.#sample(this.#read + i) : this.#last * GLIDE;
      return this.#last * (1 - i / length);
    }).reverse();
    this.#flowing = false;
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
