// Shows the stored conversations: searchable, to be opened, renamed, exported and deleted.

import { arrange, element } from "../common/elements.js";
import { exportJson, exportMarkdown, importJson } from "./export.js";
import { erase, listHeads, read, write } from "./store.js";

const $ = (id) => document.getElementById(id);
const WIDE = matchMedia("(min-width: 64rem)");
const NOTICE = 10_000; // ms in which a deletion can be undone

export class ConversationList {
  #heads = [];
  #current = ""; // id
  #loads = 0;
  #rows = new Map(); // {row, name} by id
  #channel = new BroadcastChannel("motet-conversations"); // to the list in other tabs
  #open; // opens the conversation with an id
  #closed; // the current conversation was deleted
  #renamed; // stores a new name
  #problem; // shows an error message

  constructor({ open, closed, renamed, problem }) {
    [this.#open, this.#closed, this.#renamed, this.#problem] = [open, closed, renamed, problem];
    $("search").addEventListener("input", () => this.#draw());
    $("conversations-toggle").addEventListener("click", () => this.#show($("conversations").hidden));
    $("export-all").addEventListener("click", () => this.#exportAll());
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.#import());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && !WIDE.matches && !$("conversations").hidden) this.#show(false);
    });
    WIDE.addEventListener("change", () => this.#show(WIDE.matches, false));
    this.#show(WIDE.matches && localStorage.getItem("motet-conversations") !== "closed", false);
    this.#channel.onmessage = () => this.#load();
  }

  // Reads the list anew; `current`: the id of the conversation that is shown.
  async refresh(current) {
    this.#current = current;
    await this.#load();
    this.#channel.postMessage("changed");
  }

  async #load() {
    const load = ++this.#loads;
    const heads = await listHeads();
    if (load !== this.#loads) return; // a later one has newer heads
    this.#heads = heads;
    this.#draw();
  }

  // Moves the focus into the list as it opens, and back as it closes.
  #show(shown, focus = true) {
    $("conversations").hidden = !shown;
    $("conversations-toggle").setAttribute("aria-expanded", String(shown));
    if (!focus) return;
    if (WIDE.matches) localStorage.setItem("motet-conversations", shown ? "open" : "closed");
    (shown ? $("search") : $("conversations-toggle")).focus();
  }

  #draw() {
    const words = $("search").value.toLowerCase().split(/\s+/).filter(Boolean);
    const found = this.#heads.filter(({ name, text }) => {
      const searched = `${name}\n${text}`.toLowerCase();
      return words.every((word) => searched.includes(word));
    });
    arrange($("conversation-list"), found.map((head) => this.#rowOf(head)));
    $("no-conversations").hidden = found.length > 0;
    $("no-conversations").textContent = words.length ? "No conversation has these words." : "No conversation yet.";
  }

  // Returns the row of a conversation, the same one as before unless its name has changed.
  #rowOf(head) {
    let known = this.#rows.get(head.id);
    if (known?.name !== head.name) this.#rows.set(head.id, (known = { row: this.#row(head), name: head.name }));
    const title = known.row.querySelector(".title");
    if (head.id === this.#current) title?.setAttribute("aria-current", "true");
    else title?.removeAttribute("aria-current");
    return known.row;
  }

  #row(head) {
    const title = element("button", { type: "button", class: "title", title: head.name }, head.name);
    title.addEventListener("click", () => this.#choose(head.id));
    const row = element("li", {}, title);
    const work = {
      Rename: () => this.#rename(row, head),
      "Export as Markdown": async () => exportMarkdown(await read(head.id)),
      "Export as JSON": async () => exportJson([await read(head.id)], head.name),
      Delete: () => this.#delete(head.id),
    };
    const buttons = Object.entries(work).map(([label, run]) => {
      const button = element("button", { type: "button", class: "plain" }, label);
      button.addEventListener("click", () => {
        menu.open = false;
        run();
      });
      return button;
    });
    const summary = element("summary", { "aria-label": `Options of ${head.name}`, title: "Options" });
    const menu = element("details", { class: "menu options" }, summary, element("div", { class: "choices" }, ...buttons));
    row.append(menu);
    return row;
  }

  #choose(id) {
    if (!WIDE.matches) this.#show(false);
    this.#open(id);
  }

  #rename(row, head) {
    const field = element("input", { "aria-label": "Name", value: head.name, maxlength: "200" });
    let settled = false;
    const finish = async (keep) => {
      if (settled) return;
      settled = true;
      this.#rows.delete(head.id);
      if (keep && field.value.trim()) await this.#renamed(head.id, field.value.trim());
      await this.#load();
    };
    field.addEventListener("keydown", (event) => {
      if (event.key === "Enter") finish(true);
      if (event.key === "Escape") finish(false);
      event.stopPropagation();
    });
    field.addEventListener("blur", () => finish(true));
    row.replaceChildren(field);
    field.select();
  }

  async #delete(id) {
    const conversation = await read(id);
    await erase(id);
    if (id === this.#current) this.#closed();
    await this.#load();
    this.#offerUndo(conversation);
  }

  #offerUndo(conversation) {
    const undo = element("button", { type: "button", class: "secondary small" }, "Undo");
    const hide = () => ($("notice").hidden = true);
    undo.addEventListener("click", async () => {
      hide();
      await write(conversation);
      await this.#load();
    });
    $("notice").replaceChildren(`Deleted “${conversation.name}”. `, undo);
    $("notice").hidden = false;
    setTimeout(() => undo.isConnected && hide(), NOTICE);
  }

  async #exportAll() {
    const all = await Promise.all(this.#heads.map(({ id }) => read(id)));
    exportJson(all.filter(Boolean), "motet conversations");
  }

  async #import() {
    const [file] = $("import-file").files;
    $("import-file").value = "";
    try {
      for (const conversation of await importJson(file)) await write(conversation);
    } catch (error) {
      this.#problem(`${file.name} cannot be imported: ${error.message}`);
    }
    await this.#load();
  }
}
