// Shows what each model of the server can do, in an empty conversation.

import { element } from "../common/elements.js";

const $ = (id) => document.getElementById(id);
const KINDS = { speech: "speaks", transcription: "hears", embedding: "embeds", ranking: "ranks", image: "draws" };

// Returns what a model of `/v1/models` can do, as words.
export function abilitiesOf({ kind, images, tools, reasoning, context_length: context }) {
  if (kind !== "chat") return [KINDS[kind] ?? kind];
  const length = context >= 1024 ? `${Math.round(context / 1024)}k` : context;
  return ["chats", images && "sees", reasoning && "thinks", tools && "calls tools", context && `${length} tokens of context`].filter(Boolean);
}

export function showModels(models) {
  const cards = models.map((model) => {
    const tags = abilitiesOf(model).map((text) => element("span", { class: "tag" }, text));
    if (model.status === "starting") tags.push(element("span", { class: "tag starting" }, "starting…"));
    return element("li", {}, element("b", {}, model.id), ...tags);
  });
  $("models").replaceChildren(...cards);
  $("models-title").hidden = !models.length;
}
