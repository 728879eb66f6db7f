// Holds one conversation as a tree of messages, so that an edited or regenerated message keeps its other versions.

// Returns 16 random hexadecimal digits. (`crypto.randomUUID` exists on https and loopback only.)
export function newId() {
  return [...crypto.getRandomValues(new Uint8Array(8))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

const TITLE_LENGTH = 60;

export class Conversation {
  #nodes = new Map(); // {id, parent, role, content, …} by id, in order of creation
  #leaf = null; // id of the last message shown
  #removed = new Set(); // ids that a stored copy may still have
  #changed = () => {};
  id = newId();
  title = ""; // given by the user; empty: the first message is its title
  created = Date.now();
  updated = Date.now();
  settings = {};
  erased = false; // deleted by the user: not to be stored again

  // `record`: of `toRecord`.
  static from(record) {
    const made = new Conversation();
    const { id, title, created, updated, settings, nodes, leaf } = record;
    Object.assign(made, { id, title, created, updated, settings });
    for (const node of nodes) made.#nodes.set(node.id, node);
    made.#leaf = made.#nodes.has(leaf) ? leaf : (nodes.at(-1)?.id ?? null);
    return made;
  }

  toRecord() {
    const { id, title, created, updated, settings } = this;
    return { id, title, created, updated, settings, nodes: [...this.#nodes.values()], leaf: this.#leaf };
  }

  // Returns the nodes of a stored copy that this one neither has nor has removed: those of another tab.
  missingFrom(nodes) {
    return nodes.filter(({ id }) => !this.#nodes.has(id) && !this.#removed.has(id));
  }

  onChange(work) {
    this.#changed = work;
  }

  get isEmpty() {
    return this.#nodes.size === 0;
  }

  get name() {
    if (this.title) return this.title;
    const first = [...this.#nodes.values()].find(({ content }) => content)?.content ?? "New chat";
    const line = first.trim().split("\n")[0];
    return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH - 1)}…` : line;
  }

  // Returns all text of it, of every version, for a search.
  get text() {
    return [this.title, ...[...this.#nodes.values()].map(({ content }) => content)].join("\n");
  }

  // Returns the messages from the first to the last one shown.
  get path() {
    const found = [];
    for (let node = this.#nodes.get(this.#leaf); node; node = this.#nodes.get(node.parent)) found.unshift(node);
    return found;
  }

  [Symbol.iterator]() {
    return this.path[Symbol.iterator]();
  }

  // Appends a message behind the last one. `node` stays the same object, which the caller may change further.
  push(node) {
    Object.assign(node, { id: newId(), parent: this.#leaf });
    this.#nodes.set(node.id, node);
    this.#leaf = node.id;
    this.touch();
    return node;
  }

  // Removes the last message.
  pop() {
    const node = this.#nodes.get(this.#leaf);
    this.#nodes.delete(node.id);
    this.#removed.add(node.id);
    this.#leaf = node.parent;
    this.touch();
    return node;
  }

  // Makes the message before `node` the last one shown; what follows stays as another version.
  rewind(node) {
    this.#leaf = node.parent;
  }

  // Returns the versions of a message, itself among them, in order of creation.
  versions(node) {
    return [...this.#nodes.values()].filter(({ parent }) => parent === node.parent);
  }

  // Shows this version of a message, with the newest messages behind it.
  select(node) {
    for (let next = node; next; next = this.#newestChild(next)) this.#leaf = next.id;
    this.touch();
  }

  #newestChild({ id }) {
    return [...this.#nodes.values()].findLast(({ parent }) => parent === id);
  }

  // Returns a new conversation with the messages up to `node`.
  branch(node) {
    const made = new Conversation();
    made.title = `${this.name} (branch)`;
    made.settings = { ...this.settings };
    for (const one of this.path.slice(0, this.path.indexOf(node) + 1)) made.push(structuredClone(one));
    return made;
  }

  // Notes a change, so that it is saved.
  touch() {
    this.updated = Date.now();
    this.#changed();
  }
}
