// Reads the user's settings: model, sampling, voice, key. All are remembered by this browser, but the key by this tab only.

import { ApiError, listModels, listVoices } from "./api.js";

const $ = (id) => document.getElementById(id);

const REMEMBERED = ["model", "system", "temperature", "top-p", "seed", "max-tokens", "voice-name"]; // ids of fields
const STORED = "motet-settings";

let models = []; // of `/v1/models`
let wanted = remembered(); // values by id; of lists that are still empty, too

for (const id of REMEMBERED) {
  if (wanted[id] !== undefined) $(id).value = wanted[id];
  $(id).addEventListener("change", remember);
}

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
  const topP = parseFloat($("top-p").value);
  const seed = parseInt($("seed").value, 10);
  const chat = models.find(({ id }) => id === $("model").value);
  return {
    model: $("model").value,
    imageModel: firstOf("image"),
    videoModel: firstOf("video"),
    speechModel: firstOf("speech"),
    asrModel: firstOf("transcription"),
    acceptsImages: Boolean(chat?.images),
    acceptsSounds: Boolean(chat?.audio),
    supportsTools: Boolean(chat?.tools),
    key: $("key").value,
    system: $("system").value.trim(),
    temperature: Number.isFinite(temperature) ? temperature : 0,
    topP: topP > 0 && topP <= 1 ? topP : null,
    seed: seed >= 0 ? seed : null,
    maxTokens: maxTokens > 0 ? maxTokens : null,
    voice: $("voice-name").value,
  };
}

const firstOf = (kind) => models.find((model) => model.kind === kind)?.id ?? "";

// Returns the values that a conversation keeps, by the ids of their fields.
export const snapshot = () => Object.fromEntries(REMEMBERED.map((id) => [id, isLoading($(id)) ? (wanted[id] ?? "") : $(id).value]));

// Returns whether a list still lacks its choices.
const isLoading = (field) => field.tagName === "SELECT" && field.options.length < 2 && !field.value;

// Applies values of `snapshot`. A model that the server lacks stays as it is.
export function applySnapshot(values) {
  wanted = { ...wanted, ...values };
  for (const id of REMEMBERED) if (typeof values[id] === "string") choose($(id), values[id]);
  remember();
  $("model").dispatchEvent(new Event("change"));
}

function choose(field, value) {
  if (field.tagName !== "SELECT" || [...field.options].some((option) => option.value === value)) field.value = value;
}

function remember() {
  wanted = snapshot();
  localStorage.setItem(STORED, JSON.stringify(wanted));
}

function remembered() {
  try {
    return Object(JSON.parse(localStorage.getItem(STORED)));
  } catch {
    return {};
  }
}

export function onKeyChange(work) {
  $("key").addEventListener("change", () => work());
}

// Fills the lists of models and voices, and returns the models. Throws ApiError without a chat model.
export async function loadLists() {
  const [found, voices] = await Promise.all([listModels($("key").value), listVoices($("key").value)]);
  models = found;
  const chats = models.filter(({ kind }) => kind === "chat");
  if (!chats.length) throw new ApiError("No model is ready yet.", 503);
  fill($("model"), chats.map(({ id }) => id));
  fill($("voice-name"), voices, new Option("default", ""));
  $("voice-name").closest("label").hidden = !voices.length;
  return models;
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

// Replaces the choices of a list, unless it has them already: it may be open.
function fill(select, names, ...before) {
  const shown = [...select.options].slice(before.length).map(({ value }) => value);
  if (select.dataset.filled && shown.join("\n") === names.join("\n")) return;
  const chosen = isLoading(select) ? (wanted[select.id] ?? "") : select.value;
  select.replaceChildren(...before, ...names.map((name) => new Option(name, name, false, name === chosen)));
  if (!select.dataset.filled) select.disabled = false; // later, a spoken conversation may have locked it
  select.dataset.filled = "yes";
}
