// The last looks at the stack, and what changes from one to another.

const KEPT = 90;
const APART = 2.5; // s: what is done in a second is told of no less than this

export class Looks {
  #all = []; // the newest last

  add(look) {
    const byName = new Map(look.instances.map((one) => [one.instance, one]));
    this.#all.push({ ...look, byName });
    if (this.#all.length > KEPT) this.#all.shift();
  }

  clear() {
    this.#all = [];
  }

  get now() {
    return this.#all.at(-1);
  }

  // What an instance does per second; null where nothing is counted, or it was not there before.
  work(instance) {
    return this.#change(this.#all.length - 1, instance, (one) => one.work?.done);
  }

  // How many cores an instance takes.
  cores(instance) {
    return this.#change(this.#all.length - 1, instance, (one) => one.load.cpu);
  }

  // `read` of each look, the newest last.
  series(read) {
    return this.#all.map((look) => read(look));
  }

  // What all instances of a role do per second, look by look.
  workOf(role) {
    return this.#all.map((look, index) => {
      const names = look.instances.filter((one) => one.role === role).map((one) => one.instance);
      const known = names.map((name) => this.#change(index, name, (one) => one.work?.done)).filter((done) => done !== null);
      return known.length ? known.reduce((sum, done) => sum + done, 0) : null;
    });
  }

  #change(index, name, read) {
    const now = this.#all[index];
    const before = this.#before(index);
    const [newer, older] = [now, before].map((look) => look?.byName.get(name)).map((one) => (one ? read(one) : undefined));
    if (newer === undefined || older === undefined) return null;
    return Math.max(newer - older, 0) / (now.time - before.time);
  }

  // The last look that is old enough, or else the oldest one.
  #before(index) {
    const { time } = this.#all[index];
    let found = null;
    for (let at = index - 1; at >= 0; at -= 1) {
      found = this.#all[at];
      if (time - found.time >= APART) return found;
    }
    return found;
  }
}
