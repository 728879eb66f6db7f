// The chat page: one conversation, streamed. What it shows is text only; nothing a model says becomes markup.

import { ApiError, listModels, streamChat } from "./api.js";

const $ = (id) => document.getElementById(id);
const log = $("log");
const message = $("message");

let history = [];
let running = null; // the AbortController of the reply that streams

$("key").value = sessionStorage.getItem("motet-key") ?? "";
$("key").addEventListener("change", () => {
  sessionStorage.setItem("motet-key", $("key").value);
  loadModels();
});
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
loadModels();

async function loadModels(tries = 60) {
  const select = $("model");
  const chosen = select.value;
  try {
    const names = await listModels($("key").value);
    if (!names.length) throw new ApiError("No model is ready yet.", 503);
    select.replaceChildren(...names.map((name) => new Option(name, name, false, name === chosen)));
    select.disabled = false;
    showError("");
  } catch (error) {
    showError(error.message);
    if (error.status === 401) {
      $("settings").open = true;
      $("key").focus();
    } else if (tries > 0) {
      setTimeout(() => loadModels(tries - 1), 1000);
    }
  }
}

async function send() {
  const text = message.value.trim();
  if (!text || running) return;
  message.value = "";
  fit();
  showError("");
  history.push({ role: "user", content: text });
  bubble("user").textContent = text;
  await reply();
  message.focus();
}

async function reply() {
  running = new AbortController();
  setBusy(true);
  const target = bubble("assistant");
  const meter = new Meter();
  const mine = history; // "New chat" may start another one meanwhile
  let text = "";
  const draw = throttle(() => {
    const follow = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
    target.textContent = text;
    $("stats").textContent = meter.toString();
    if (follow) log.scrollTop = log.scrollHeight;
  });
  try {
    for await (const chunk of streamChat(body(), $("key").value, running.signal)) {
      const piece = chunk.choices[0]?.delta?.content;
      meter.saw(piece, chunk.usage);
      text += piece ?? "";
      draw();
    }
  } catch (error) {
    if (error.name === "AbortError") meter.note = "stopped";
    else showError(error.message);
  } finally {
    draw.now();
    if (text) mine.push({ role: "assistant", content: text });
    else if (mine === history) discard(target);
    running = null;
    setBusy(false);
  }
}

// Nothing was said: take the question back, so that it can be sent again.
function discard(target) {
  target.parentElement.previousElementSibling?.remove();
  target.parentElement.remove();
  const question = history.pop();
  if (!message.value) {
    message.value = question?.content ?? "";
    fit();
  }
}

function body() {
  const system = $("system").value.trim();
  const most = parseInt($("max-tokens").value, 10);
  const temperature = parseFloat($("temperature").value);
  return {
    model: $("model").value,
    messages: [...(system ? [{ role: "system", content: system }] : []), ...history],
    temperature: Number.isFinite(temperature) ? temperature : 0,
    ...(most > 0 ? { max_completion_tokens: most } : {}),
  };
}

// Time to first token, and tokens per second after it.
class Meter {
  began = performance.now();
  first = null;
  last = null;
  tokens = 0;
  note = "";

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
    const speed = this.tokens > 1 && seconds > 0 ? `${((this.tokens - 1) / seconds).toFixed(1)} tokens/s` : "";
    const parts = [`first token ${Math.round(this.first - this.began)} ms`, speed, `${this.tokens} tokens`, this.note];
    return parts.filter(Boolean).join(" · ");
  }
}

function bubble(role) {
  $("welcome")?.remove();
  const article = document.createElement("article");
  article.className = role;
  article.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const text = document.createElement("p");
  article.append(text);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return text;
}

function startOver() {
  running?.abort();
  history = [];
  log.replaceChildren();
  showError("");
  $("stats").textContent = "";
  message.focus();
}

function setBusy(busy) {
  log.setAttribute("aria-busy", String(busy));
  $("send").hidden = busy;
  $("stop").hidden = !busy;
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
