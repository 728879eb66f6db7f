// Keeps the latest states of the stack, and computes rates between them.

const MAX_SAMPLES = 90;
const MIN_INTERVAL = 2.5; // seconds between the states that a rate is computed from

export class StackHistory {
  #samples = []; // the newest last

  add(sample) {
    const byName = new Map(sample.instances.map((one) => [one.instance, one]));
    this.#samples.push({ ...sample, byName });
    if (this.#samples.length > MAX_SAMPLES) this.#samples.shift();
  }

  clear() {
    this.#samples = [];
  }

  get latest() {
    return this.#samples.at(-1);
  }

  // Returns an instance's work per second; null without a counter or an earlier state.
  workRate(instance) {
    return this.#rate(this.#samples.length - 1, instance, (one) => one.work?.done);
  }

  // Returns the CPU cores that an instance uses.
  coresInUse(instance) {
    return this.#rate(this.#samples.length - 1, instance, (one) => one.load.cpu);
  }

  // Returns `read` of each state, the newest last.
  series(read) {
    return this.#samples.map((sample) => read(sample));
  }

  // Returns the work per second of all instances of a role, by state.
  workRateOfRole(role) {
    return this.#samples.map((sample, index) => {
      const names = sample.instances.filter((one) => one.role === role).map((one) => one.instance);
      const known = names.map((name) => this.#rate(index, name, (one) => one.work?.done)).filter((done) => done !== null);
      return known.length ? known.reduce((sum, done) => sum + done, 0) : null;
    });
  }

  #rate(index, name, read) {
    const latest = this.#samples[index];
    const before = this.#earlier(index);
    const [newer, older] = [latest, before].map((sample) => sample?.byName.get(name)).map((one) => (one ? read(one) : undefined));
    if (newer === undefined || older === undefined || latest.time <= before.time) return null;
    return Math.max(newer - older, 0) / (latest.time - before.time);
  }

  // Returns the latest state that is MIN_INTERVAL older, or else the oldest.
  #earlier(index) {
    const { time } = this.#samples[index];
    let found = null;
    for (let at = index - 1; at >= 0; at -= 1) {
      found = this.#samples[at];
      if (time - found.time >= MIN_INTERVAL) return found;
    }
    return found;
  }
}
