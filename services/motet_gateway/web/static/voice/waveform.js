// Draws the latest seconds of audio, the newest on the right: the user's and the model's.

const BAR = 4; // CSS pixels from one bar to the next
const EVERY = 40; // ms

export class Waveform {
  #canvas;
  #sources;
  #bars = []; // {level, colour: a CSS variable}, newest first
  #timer;
  #samples = new Float32Array(2048);

  // `user`, `model`: the AnalyserNodes of their audio.
  constructor(canvas, { user, model }) {
    this.#canvas = canvas;
    this.#sources = [
      { analyser: user, colour: "--accent" },
      { analyser: model, colour: "--model" },
    ];
    const calm = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.#timer = setInterval(() => this.#step(), calm ? 500 : EVERY);
  }

  close() {
    clearInterval(this.#timer);
  }

  #step() {
    const levels = this.#sources.map(({ analyser, colour }) => ({ level: this.#level(analyser), colour }));
    this.#bars.unshift(levels.reduce((a, b) => (b.level > a.level ? b : a)));
    this.#draw();
  }

  // Returns 0 at -54 dB of full scale, 1 at full scale.
  #level(analyser) {
    analyser.getFloatTimeDomainData(this.#samples);
    const power = this.#samples.reduce((sum, sample) => sum + sample * sample, 0) / this.#samples.length;
    return Math.max(0, Math.min(1, 1 + Math.log10(power + 1e-9) / 5.4));
  }

  #draw() {
    const { clientWidth: width, clientHeight: height } = this.#canvas;
    const scale = devicePixelRatio;
    [this.#canvas.width, this.#canvas.height] = [width * scale, height * scale];
    this.#bars.length = Math.min(this.#bars.length, Math.ceil(width / BAR));
    const style = getComputedStyle(this.#canvas);
    const pen = this.#canvas.getContext("2d");
    pen.scale(scale, scale);
    for (const [index, { level, colour }] of this.#bars.entries()) {
      const tall = Math.max(2, level * height);
      pen.fillStyle = style.getPropertyValue(level > 0 ? colour : "--line");
      pen.fillRect(width - (index + 1) * BAR, (height - tall) / 2, BAR - 1.5, tall);
    }
  }
}
