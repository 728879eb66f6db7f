// Measures a reply: the time to its first token, and the tokens per second after it.

export class Meter {
  #started = performance.now();
  #first = null;
  #last = null;
  #tokens = 0;
  note = "";
  hasPictures = false; // image generation takes time that would distort tokens/s

  add(piece, usage) {
    if (piece) {
      this.#last = performance.now();
      this.#first ??= this.#last;
      this.#tokens += 1;
    }
    if (usage) this.#tokens = usage.completion_tokens;
  }

  toString() {
    if (this.#first === null) return this.note || "waiting…";
    const seconds = (this.#last - this.#first) / 1000;
    const speed = this.#tokens > 1 && seconds > 0 && !this.hasPictures ? `${((this.#tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const parts = [`first token ${Math.round(this.#first - this.#started)} ms`, speed, `${this.#tokens} tokens`, this.note];
    return parts.filter(Boolean).join(" · ");
  }
}
