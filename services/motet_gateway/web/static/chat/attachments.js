// Attaches chosen, pasted or dropped files to the next message: pictures, sounds and text.

import { element } from "../common/elements.js";
import { readFile } from "./files.js";

const $ = (id) => document.getElementById(id);

export class Attachments {
  #items = []; // of files.js
  #problem; // shows an error message
  #keep; // gets the attachments after each change, and resolves when they are stored
  #abilities = {}; // of files.js
  #reading = new Set(); // names of files that are being read
  #settled = Promise.resolve(true); // of `settled`

  constructor(problem, keep) {
    [this.#problem, this.#keep] = [problem, keep];
    const picker = $("attachment-file");
    $("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", async () => {
      await this.#read([...picker.files]);
      picker.value = "";
    });
    document.addEventListener("paste", (event) => this.#receive(event, event.clipboardData));
    document.addEventListener("drop", (event) => this.#receive(event, event.dataTransfer));
    for (const kind of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => this.#dragged(event, kind === "dragover"));
    }
  }

  // Sets what the chosen model and the server can read; pictures are detached if the model does not accept them.
  enable(abilities) {
    this.#abilities = abilities;
    const readable = abilities.images ? this.#items : this.#items.filter(({ kind }) => kind !== "picture");
    if (readable.length < this.#items.length) this.set(readable);
  }

  get acceptsPictures() {
    return Boolean(this.#abilities.images);
  }

  get isEmpty() {
    return this.#items.length === 0;
  }

  // Returns the attachments and detaches them.
  takeAll() {
    const items = this.#items;
    this.set([]);
    return items;
  }

  // Resolves when the files that were chosen last have been read, with whether all of them could be: sounds are transcribed first.
  get settled() {
    return this.#settled;
  }

  set(items) {
    const changed = items.length || this.#items.length;
    this.#items = items;
    if (changed) this.#store();
    const reading = [...this.#reading].map((name) => element("span", { class: "thumbnail pending", role: "status" }, `Reading ${name}…`));
    $("attachments").replaceChildren(...items.map((item, index) => this.#thumbnail(item, index)), ...reading);
    $("attachments").hidden = !items.length && !reading.length;
  }

  // The list is busy until the browser has stored it.
  async #store() {
    const items = this.#items;
    $("attachments").ariaBusy = "true";
    await this.#keep(items);
    if (this.#items === items) $("attachments").ariaBusy = "false";
  }

  // Adds a picture.
  add(url, name = "picture") {
    this.set([...this.#items, { kind: "picture", name, url }]);
  }

  #thumbnail({ kind, name, url }, index) {
    const label = `${kind === "picture" ? `Picture ${index + 1}` : name}, remove`;
    const shown = kind === "picture" ? picture(url, label) : element("span", { class: "file" }, name);
    const button = element("button", { type: "button", class: "thumbnail", title: "Remove", "aria-label": label }, shown);
    button.addEventListener("click", () => this.set(this.#items.filter((_, other) => other !== index)));
    return button;
  }

  #dragged(event, over) {
    const files = event.dataTransfer?.types.includes("Files");
    if (files) event.preventDefault(); // else the browser opens the file instead of the page
    document.body.classList.toggle("dropping", Boolean(over && files));
  }

  #receive(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.#read([...data.files]);
  }

  #read(files) {
    for (const { name } of files) this.#reading.add(name);
    this.set(this.#items);
    const earlier = this.#settled;
    const settled = (async () => {
      await earlier;
      const read = [];
      for (const file of files) read.push(await this.#readOne(file));
      return read.every(Boolean);
    })();
    this.#settled = settled;
    return settled.then(() => this.#settled === settled && (this.#settled = Promise.resolve(true)));
  }

  async #readOne(file) {
    const item = await readFile(file, this.#abilities).catch((error) => {
      this.#problem(error.message);
      return null;
    });
    this.#reading.delete(file.name);
    this.set(item ? [...this.#items, item] : this.#items);
    return item;
  }
}

export function picture(url, alt) {
  return element("img", { src: url, alt });
}
