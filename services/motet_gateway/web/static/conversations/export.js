// Exports conversations as Markdown, to read, or as JSON, with all versions of all messages; imports the latter.

import { Conversation, newId } from "./conversation.js";

const NAMES = { user: "You", assistant: "Model" };
const FORMAT = "motet-conversations";

// Saves a text or a Blob as a file of the user.
export function download(name, content, type) {
  const url = URL.createObjectURL(new Blob([content], { type }));
  const link = Object.assign(document.createElement("a"), { href: url, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
}

export function exportMarkdown(conversation) {
  const parts = conversation.path.filter(({ content }) => content).map(({ role, content }) => `## ${NAMES[role]}\n\n${content}\n`);
  download(`${fileName(conversation.name)}.md`, `# ${conversation.name}\n\n${parts.join("\n")}`, "text/markdown");
}

export function exportJson(conversations, name) {
  const content = JSON.stringify({ format: FORMAT, conversations: conversations.map((one) => one.toRecord()) });
  download(`${fileName(name)}.json`, content, "application/json");
}

// Reads a file of `exportJson`. Each conversation gets a new id, so that it replaces none. Throws Error if it is another file.
export async function importJson(file) {
  const parsed = JSON.parse(await file.text());
  if (parsed?.format !== FORMAT || !Array.isArray(parsed.conversations)) throw new Error("not an export of this page");
  return parsed.conversations.map((record) => Conversation.from({ ...checked(record), id: newId() }));
}

// Returns the fields that a record may have, with messages whose text is text.
function checked({ title, created, updated, settings, nodes, leaf }) {
  const known = nodes.filter(({ id, role, content }) => typeof id === "string" && role in NAMES && typeof content === "string");
  return {
    title: String(title ?? ""),
    created: Number(created) || Date.now(),
    updated: Number(updated) || Date.now(),
    settings: Object(settings),
    nodes: known.map(plain),
    leaf,
  };
}

// Returns a message without pictures and videos that are not data of the file itself.
function plain(node) {
  const own = (url) => typeof url === "string" && url.startsWith("data:");
  const { id, parent = null, role, content, reasoning, drawing, mask, filming, film } = node;
  const images = (node.images ?? []).filter(own);
  const drawn = (node.drawn ?? []).filter((one) => own(one?.image_url?.url));
  const files = (node.files ?? [])
    .filter(({ name, text }) => typeof name === "string" && typeof text === "string")
    .map(({ kind, name, text, url, spoken }) => ({ kind: kind === "sound" ? kind : "text", name, text, ...(own(url) ? { url } : {}), ...(spoken ? { spoken: true } : {}) }));
  const calls = (node.calls ?? []).map((call) => ({ name: String(call?.name), arguments: String(call?.arguments) }));
  const made = { id, parent, role, content, images, drawn, files, calls, drawing: Boolean(drawing) };
  if (typeof reasoning === "string") made.reasoning = reasoning;
  if (own(mask)) made.mask = mask;
  if (filming) made.filming = true;
  if (own(film?.url)) made.film = { url: film.url, prompt: String(film.prompt) };
  return made;
}

const fileName = (name) => name.replace(/[^\p{L}\p{N} ._-]/gu, "").trim().slice(0, 60) || "conversation";
