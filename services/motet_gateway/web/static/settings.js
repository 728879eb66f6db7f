// What the user has set: the model, how it answers, the voice, the key. The key stays in this tab.

import { ApiError, listModels, listVoices } from "./api.js";

const $ = (id) => document.getElementById(id);

let chats = []; // the models that can be talked to
let painters = []; // names of those that draw

$("key").value = sessionStorage.getItem("motet-key") ?? "";

$("key").addEventListener("change", () => sessionStorage.setItem("motet-key", $("key").value));
$("key").addEventListener("keydown", (event) => {
  if (event.key !== "Enter") return;
  event.preventDefault(); // or it would open the menu again, which has the keyboard by then
  closeMenu();
});

export function settings() {
  const most = parseInt($("max-tokens").value, 10);
  const temperature = parseFloat($("temperature").value);
  const seed = parseInt($("seed").value, 10);
  return {
    model: $("model").value,
    painter: painters[0] ?? "",
    seesImages: chats.some(({ id, images }) => id === $("model").value && images),
    takesTools: chats.some(({ id, tools }) => id === $("model").value && tools),
    key: $("key").value,
    system: $("system").value.trim(),
    temperature: Number.isFinite(temperature) ? temperature : 0,
    seed: seed >= 0 ? seed : null,
    most: most > 0 ? most : null,
    voice: $("voice-name").value,
  };
}

export function onKeyChange(work) {
  $("key").addEventListener("change", () => work());
}

// Fills the lists of models and voices. ApiError if no model can be talked to.
export async function loadLists() {
  const [models, voices] = await Promise.all([listModels($("key").value), listVoices($("key").value)]);
  chats = models.filter(({ kind }) => kind === "chat");
  painters = models.filter(({ kind }) => kind === "image").map(({ id }) => id);
  if (!chats.length) throw new ApiError("No model is ready yet.", 503);
  fill($("model"), chats.map(({ id }) => id));
  fill($("voice-name"), voices, new Option("the model's own", ""));
  $("voice-name").closest("label").hidden = !voices.length;
}

export function onModelChange(work) {
  $("model").addEventListener("change", work);
}

export function askForKey() {
  $("settings").open = true;
  $("key").focus();
}

// Leaving a field takes what was written there.
function closeMenu() {
  $("settings").querySelector("summary").focus();
  $("settings").open = false;
}

// A conversation that is spoken keeps the model that it began with.
export function lockModel(locked) {
  $("model").disabled = locked;
}

function fill(select, names, ...before) {
  const chosen = select.value;
  select.replaceChildren(...before, ...names.map((name) => new Option(name, name, false, name === chosen)));
  select.disabled = false;
}
