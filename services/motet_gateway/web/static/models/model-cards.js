// Shows what each model of the server can do, in an empty conversation, and how far those are that are still loaded.

import { element } from "../common/elements.js";
import { loadingText } from "./loading.js";

const $ = (id) => document.getElementById(id);
const KINDS = { speech: "speaks", transcription: "hears", embedding: "embeds", ranking: "ranks", image: "draws" };

// Returns what a model of `/v1/models` can do, as words.
export function abilitiesOf({ kind, images, audio, tools, reasoning, context_length: context }) {
  if (kind !== "chat") return [KINDS[kind] ?? kind];
  const length = context >= 1024 ? `${Math.round(context / 1024)}k` : context;
  return ["chats", images && "sees", audio && "hears", reasoning && "thinks", tools && "calls tools", context && `${length} tokens of context`].filter(Boolean);
}

// Returns what is shown of a model that is not ready.
function stateOf({ id, status, loading }) {
  if (status === "starting") return [element("span", { class: "tag starting" }, "starting…")];
  if (!loading) return [];
  const text = element("span", { class: status === "failed" ? "loading failed" : "loading" }, loadingText(loading));
  if (status !== "loading") return [text];
  return [text, element("progress", { value: loading.share, max: 1, "aria-label": `Loading ${id}` })];
}

export function showModels(models) {
  const cards = models.map((model) => {
    const tags = abilitiesOf(model).map((text) => element("span", { class: "tag" }, text));
    return element("li", {}, element("b", {}, model.id), ...tags, ...stateOf(model));
  });
  $("models").replaceChildren(...cards);
  $("models-title").hidden = !models.length;
}
