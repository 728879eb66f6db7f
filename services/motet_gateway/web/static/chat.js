// The page: one conversation, written or spoken. What is typed goes the way of the other, if that is being spoken.

import { streamChat } from "./api.js";
import { Attachments, picture } from "./attachments.js";
import { bubble, clear, remove, setBusy, show } from "./bubbles.js";
import { Drawing, Drawings, TOOL } from "./drawing.js";
import { offerIdeas } from "./ideas.js";
import { askForKey, loadLists, onKeyChange, onModelChange, settings } from "./settings.js";
import { Talk } from "./talk.js";

const $ = (id) => document.getElementById(id);
const message = $("message");

let history = []; // {role, content, images, drawn}; without content where nothing was understood or heard
let running = null; // the AbortController of the reply that streams
let replied = Promise.resolve(); // when it has ended
const talk = new Talk(quietHistory, showError);
const attachments = new Attachments(showError);

onKeyChange(loadModels);
onModelChange(showAbilities);
$("draw").addEventListener("click", draw);
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", startOver);
message.addEventListener("input", fit);
message.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    send();
  }
});
offerIdeas((idea) => {
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

// What the chosen model and this server can do besides text.
function showAbilities() {
  const { painter, seesImages } = settings();
  attachments.allow(seesImages);
  $("draw").hidden = !painter;
}

async function send() {
  const text = message.value.trim();
  if (!text || running) return;
  if (talk.on && attachments.any) return showError("Pictures do not go with speech: end the spoken conversation first.");
  const images = attachments.take();
  const question = ask(text, images);
  history.push({ role: "user", content: text, images });
  if (talk.on) talk.say(text);
  else await (replied = reply(question));
  message.focus();
}

// Shows what the user says, and empties the line that it was written in.
function ask(text, images = []) {
  message.value = "";
  fit();
  showError("");
  const question = bubble("user", ...images.map((url, index) => picture(url, `Picture ${index + 1}`)));
  question.textContent = text;
  return question;
}

// Draws what is written. The picture is no part of the conversation until it is asked about.
async function draw() {
  const prompt = message.value.trim();
  if (running) return;
  if (!prompt) return showError("Write what to draw.");
  const { painter, key, seed } = settings();
  const question = ask(prompt);
  running = new AbortController();
  showBusy(true);
  try {
    const drawing = new Drawing(prompt);
    const url = await drawing.run(painter, key, seed, running.signal, (line) => ($("stats").textContent = line));
    if (attachments.allowed) drawing.offer("Ask about it", () => attachments.add(url));
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

// The messages so far, once none is being written any more.
async function quietHistory() {
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
  const mine = history; // "New chat" may start another one meanwhile
  let text = "";
  const refresh = throttle(() => {
    show(() => (target.textContent = text));
    $("stats").textContent = meter.toString();
  });
  try {
    for await (const chunk of streamChat(body(), settings().key, running.signal)) {
      const delta = chunk.choices[0]?.delta ?? {};
      meter.saw(delta.content, chunk.usage);
      meter.note = drawings.saw(delta);
      meter.drew ||= Boolean(delta.images);
      text += delta.content ?? "";
      refresh();
    }
  } catch (error) {
    if (error.name === "AbortError") meter.note = "stopped";
    else showError(error.message);
  } finally {
    refresh.now();
    drawings.end();
    const { done: drawn } = drawings;
    if (text || drawn.length) mine.push({ role: "assistant", content: text, drawn });
    else if (mine === history) discard(target, question);
    running = null;
    showBusy(false);
  }
}

// Nothing was said: take the question back, so that it can be sent again.
function discard(answer, question) {
  remove(answer);
  remove(question);
  const { content, images } = history.pop();
  if (!message.value) {
    message.value = content;
    fit();
  }
  if (!attachments.any) attachments.put(images);
}

function body() {
  const { model, system, temperature, seed, most, painter, seesImages, takesTools } = settings();
  const said = history.filter(({ content, drawn }) => content || drawn?.length);
  return {
    model,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...said.map((entry) => asMessage(entry, seesImages)),
    ],
    temperature,
    seed,
    ...(most ? { max_completion_tokens: most } : {}),
    ...(painter && takesTools ? { tools: [{ ...TOOL, model: painter }] } : {}),
  };
}

// As the API takes it; a model that reads no pictures gets the words alone.
function asMessage({ role, content, images = [], drawn = [] }, seesImages) {
  if (drawn.length) return { role, content, images: drawn };
  if (!images.length || !seesImages) return { role, content };
  const parts = images.map((url) => ({ type: "image_url", image_url: { url } }));
  return { role, content: [...parts, { type: "text", text: content }] };
}

// Time to first token, and tokens per second after it.
class Meter {
  began = performance.now();
  first = null;
  last = null;
  tokens = 0;
  note = "";
  drew = false; // which takes time that is none of the tokens'

  saw(piece, usage) {
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
    const speed = this.tokens > 1 && seconds > 0 && !this.drew ? `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const parts = [`first token ${Math.round(this.first - this.began)} ms`, speed, `${this.tokens} tokens`, this.note];
    return parts.filter(Boolean).join(" · ");
  }
}

function startOver() {
  running?.abort();
  talk.end();
  attachments.put([]);
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
