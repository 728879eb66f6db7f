// Runs the chat view: one conversation, typed or spoken. Typed text joins a spoken conversation that is open.

import { streamChat } from "./api.js";
import { Attachments, picture } from "./attachments.js";
import { bubble, clear, remove, setBusy, show } from "./bubbles.js";
import { Drawing, Drawings, TOOL } from "./drawing.js";
import { showSuggestions } from "./suggestions.js";
import { askForKey, loadLists, onKeyChange, onModelChange, settings } from "./settings.js";
import { Talk } from "./talk.js";

const $ = (id) => document.getElementById(id);
const message = $("message");

let history = []; // {role, content, images, drawn}; content is empty if nothing was recognized or played
let running = null; // AbortController of the streaming reply
let replied = Promise.resolve(); // resolves when it has ended
const talk = new Talk(settledHistory, showError);
const attachments = new Attachments(showError);

onKeyChange(loadModels);
onModelChange(showAbilities);
$("draw").addEventListener("click", draw);
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", newChat);
message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
showSuggestions((idea) => {
  message.value = idea;
  send();
});
loadModels();

async function loadModels(tries = 60) {
  try {
    await loadLists();
    showAbilities();
    showError("");
  } catch (error) {
    showError(error.message);
    if (error.status === 401) askForKey();
    else if (tries > 0) setTimeout(() => loadModels(tries - 1), 1000);
  }
}

// Shows the controls that the chosen model and this server support.
function showAbilities() {
  const { imageModel, acceptsImages } = settings();
  attachments.enable(acceptsImages);
  $("draw").hidden = !imageModel;
}

async function send() {
  const text = message.value.trim();
  if (!text || running) return;
  if (talk.on && attachments.hasPictures) return showError("Pictures cannot be sent in a spoken conversation: end it first.");
  const images = attachments.takeAll();
  const question = ask(text, images);
  history.push({ role: "user", content: text, images });
  if (talk.on) talk.sendText(text);
  else await (replied = reply(question));
  message.focus();
}

// Shows the user's message and empties the input.
function ask(text, images = []) {
  message.value = "";
  fit();
  showError("");
  const question = bubble("user", ...images.map((url, index) => picture(url, `Picture ${index + 1}`)));
  question.textContent = text;
  return question;
}

// Generates a picture from the input. It is not part of the conversation until it is attached to a message.
async function draw() {
  const prompt = message.value.trim();
  if (running) return;
  if (!prompt) return showError("Enter a description of the picture first.");
  const { imageModel, key, seed } = settings();
  const question = ask(prompt);
  running = new AbortController();
  showBusy(true);
  try {
    const drawing = new Drawing(prompt);
    const url = await drawing.run(imageModel, key, seed, running.signal, (line) => ($("stats").textContent = line));
    if (attachments.enabled) drawing.addButton("Ask about it", () => attachments.add(url));
  } catch (error) {
    remove(question);
    if (!message.value) message.value = prompt;
    if (error.name === "AbortError") $("stats").textContent = "stopped";
    else showError(error.message);
  } finally {
    running = null;
    showBusy(false);
  }
}

// Returns the messages after ending the streaming reply.
async function settledHistory() {
  running?.abort();
  await replied;
  return history;
}

async function reply(question) {
  running = new AbortController();
  showBusy(true);
  const target = bubble("assistant");
  const drawings = new Drawings(target);
  const meter = new Meter();
  const conversation = history; // "New chat" may replace it meanwhile
  let text = "";
  const refresh = throttle(() => {
    show(() => (target.textContent = text));
    $("stats").textContent = meter.toString();
  });
  try {
    for await (const chunk of streamChat(body(), settings().key, running.signal)) {
      const delta = chunk.choices[0]?.delta ?? {};
      meter.add(delta.content, chunk.usage);
      meter.note = drawings.apply(delta);
      meter.hasPictures ||= Boolean(delta.images);
      text += delta.content ?? "";
      refresh();
    }
  } catch (error) {
    if (error.name === "AbortError") meter.note = "stopped";
    else showError(error.message);
  } finally {
    refresh.now();
    drawings.discardUnfinished();
    const { pictures: drawn } = drawings;
    if (text || drawn.length) conversation.push({ role: "assistant", content: text, drawn });
    else if (conversation === history) discard(target, question);
    running = null;
    showBusy(false);
  }
}

// Removes an unanswered question and restores it to the input.
function discard(answer, question) {
  remove(answer);
  remove(question);
  const { content, images } = history.pop();
  if (!message.value) {
    message.value = content;
    fit();
  }
  if (!attachments.hasPictures) attachments.set(images);
}

function body() {
  const { model, system, temperature, seed, maxTokens, imageModel, acceptsImages, supportsTools } = settings();
  const messages = history.filter(({ content, drawn }) => content || drawn?.length);
  return {
    model,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.map((entry) => asMessage(entry, acceptsImages)),
    ],
    temperature,
    seed,
    ...(maxTokens ? { max_completion_tokens: maxTokens } : {}),
    ...(imageModel && supportsTools ? { tools: [{ ...TOOL, model: imageModel }] } : {}),
  };
}

// Converts a message for the API; a model that does not accept pictures gets the text only.
function asMessage({ role, content, images = [], drawn = [] }, acceptsImages) {
  if (drawn.length) return { role, content, images: drawn };
  if (!images.length || !acceptsImages) return { role, content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...parts, { type: "text", text: content }] };
}

// Measures the time to first token and the tokens per second after it.
class Meter {
  started = performance.now();
  first = null;
  last = null;
  tokens = 0;
  note = "";
  hasPictures = false; // image generation takes time that would distort tokens/s

  add(piece, usage) {
    if (piece) {
      this.last = performance.now();
      this.first ??= this.last;
      this.tokens += 1;
    }
    if (usage) this.tokens = usage.completion_tokens;
  }

  toString() {
    if (this.first === null) return this.note || "waiting…";
    const seconds = (this.last - this.first) / 1000;
    const speed = this.tokens > 1 && seconds > 0 && !this.hasPictures ? `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const parts = [`first token ${Math.round(this.first - this.started)} ms`, speed, `${this.tokens} tokens`, this.note];
    return parts.filter(Boolean).join(" · ");
  }
}

function newChat() {
  running?.abort();
  talk.end();
  attachments.set([]);
  history = [];
  clear();
  showError("");
  $("stats").textContent = "";
  message.focus();
}

function showBusy(busy) {
  setBusy(busy);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("draw").disabled = busy;
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

function fit() {
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight, 200)}px`;
}

// Runs `work` at most once per frame; `.now()` runs it at once.
function throttle(work) {
  let waiting = 0;
  const run = () => {
    waiting = 0;
    work();
  };
  const later = () => {
    waiting ||= requestAnimationFrame(run);
  };
  later.now = () => {
    cancelAnimationFrame(waiting);
    run();
  };
  return later;
}
