// Resamples audio in pieces of any size, by a windowed sinc with one row of taps per phase.

const ZERO_CROSSINGS = 16; // of the sinc, on each side
const PASSBAND = 0.92; // share of the lower Nyquist frequency

export class Resampler {
  #up;
  #down;
  #half; // taps on each side
  #phases = [];
  #kept; // input that later output needs; starts with silence
  #at = 0; // of the next output in `#kept`, in units of 1/up of an input sample

  constructor(from, to) {
    const common = divisor(from, to);
    [this.#up, this.#down] = [to / common, from / common];
    this.#half = Math.ceil(ZERO_CROSSINGS * Math.max(1, from / to));
    this.#kept = new Float32Array(2 * this.#half - 1);
    const cutoff = PASSBAND * Math.min(1, to / from);
    for (let phase = 0; phase < this.#up; phase++) this.#phases.push(taps(phase / this.#up, this.#half, cutoff));
  }

  // Returns the output that `input` completes.
  push(input) {
    const samples = new Float32Array(this.#kept.length + input.length);
    samples.set(this.#kept);
    samples.set(input, this.#kept.length);
    const output = [];
    for (;;) {
      const first = Math.floor(this.#at / this.#up);
      if (first + 2 * this.#half > samples.length) break;
      output.push(dot(this.#phases[this.#at % this.#up], samples, first));
      this.#at += this.#down;
    }
    const used = Math.min(Math.floor(this.#at / this.#up), samples.length);
    this.#at -= used * this.#up;
    this.#kept = samples.slice(used);
    return output;
  }
}

// `offset`: of the output after an input sample, in samples. The taps sum to one.
function taps(offset, half, cutoff) {
  const row = new Float32Array(2 * half);
  for (let i = 0; i < row.length; i++) {
    const x = i - half + 1 - offset;
    const window = Math.abs(x) < half ? Math.cos((Math.PI * x) / (2 * half)) ** 2 : 0;
    row[i] = window * (x === 0 ? 1 : Math.sin(Math.PI * cutoff * x) / (Math.PI * cutoff * x));
  }
  const sum = row.reduce((a, b) => a + b);
  return row.map((tap) => tap / sum);
}

function dot(row, samples, first) {
  let sum = 0;
  for (let i = 0; i < row.length; i++) sum += row[i] * samples[first + i];
  return sum;
}

function divisor(a, b) {
  return b ? divisor(b, a % b) : a;
}
