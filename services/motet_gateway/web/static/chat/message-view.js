// Shows a stored message.

import { element } from "../common/elements.js";
import { bubble } from "./bubbles.js";
import { blobOf } from "../common/data-uri.js";
import { Drawing, enlargeable } from "./drawing.js";
import { Filming } from "./filming.js";
import { ReplyView } from "./reply-view.js";

// `askAbout`: returns what a button below a generated picture does, or null.
export function showMessage(node, askAbout) {
  if (node.role === "user") showQuestion(node);
  else if (node.drawing) showDrawing(node, askAbout);
  else if (node.film) new Filming(node.film.prompt).restore(node.film.url);
  else showReply(node);
}

function showQuestion({ content, images = [], files = [] }) {
  const pictures = images.map((url, index) => enlargeable(url, `Picture ${index + 1}`));
  bubble("user", ...pictures, ...files.map(attachedFile)).textContent = content;
}

export function attachedFile({ kind, name, url, text }) {
  const sound = kind === "sound" && url ? element("audio", { controls: "", src: URL.createObjectURL(blobOf(url)), "aria-label": name }) : "";
  if (sound && !text) return sound;
  const parts = [element("summary", {}, name), element("pre", { tabindex: "0" }, text), sound];
  return element("details", { class: "fold" }, ...parts);
}

function showDrawing({ drawn: [{ image_url: { url }, revised_prompt: prompt }] }, askAbout) {
  const drawing = new Drawing(prompt);
  drawing.restore(url);
  const work = askAbout(url);
  if (work) drawing.addButton("Ask about it", work);
}

function showReply(node) {
  const view = new ReplyView(node);
  view.drawings.apply({ images: (node.drawn ?? []).map((image, index) => ({ ...image, index })) });
  view.finish();
}
