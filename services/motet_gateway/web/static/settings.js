// Reads the user's settings: model, sampling, voice, key. The key is stored for this tab only.

import { ApiError, listModels, listVoices } from "./api.js";

const $ = (id) => document.getElementById(id);

let chats = []; // chat models
let imageModels = []; // names of image generation models

$("key").value = sessionStorage.getItem("motet-key") ?? "";

$("key").addEventListener("change", () => sessionStorage.setItem("motet-key", $("key").value));
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // else it would reopen the menu, which gets the focus
  closeMenu();
});

export function settings() {
  const maxTokens = parseInt($("max-tokens").value, 10);
  const temperature = parseFloat($("temperature").value);
  const seed = parseInt($("seed").value, 10);
  return {
    model: $("model").value,
    imageModel: imageModels[0] ?? "",
    acceptsImages: chats.some(({ id, images }) => id === $("model").value && images),
    supportsTools: chats.some(({ id, tools }) => id === $("model").value && tools),
    key: $("key").value,
    system: $("system").value.trim(),
    temperature: Number.isFinite(temperature) ? temperature : 0,
    seed: seed >= 0 ? seed : null,
    maxTokens: maxTokens > 0 ? maxTokens : null,
    voice: $("voice-name").value,
  };
}

export function onKeyChange(work) {
  $("key").addEventListener("change", () => work());
}

// Fills the lists of models and voices. Throws ApiError without a chat model.
export async function loadLists() {
  const [models, voices] = await Promise.all([listModels($("key").value), listVoices($("key").value)]);
  chats = models.filter(({ kind }) => kind === "chat");
  imageModels = models.filter(({ kind }) => kind === "image").map(({ id }) => id);
  if (!chats.length) throw new ApiError("No model is ready yet.", 503);
  fill($("model"), chats.map(({ id }) => id));
  fill($("voice-name"), voices, new Option("default", ""));
  $("voice-name").closest("label").hidden = !voices.length;
}

export function onModelChange(work) {
  $("model").addEventListener("change", work);
}

export function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

// Moving the focus commits the field's value.
function closeMenu() {
  $("settings").querySelector("summary").focus();
  $("settings").open = false;
}

// Locks the model during a spoken conversation.
export function lockModel(locked) {
  $("model").disabled = locked;
}

function fill(select, names, ...before) {
  const chosen = select.value;
  select.replaceChildren(...before, ...names.map((name) => new Option(name, name, false, name === chosen)));
  select.disabled = false;
}
