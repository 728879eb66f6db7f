// Runs the chat view: conversations, typed or spoken. Typed text joins a spoken conversation that is open.

import { applySnapshot, askForKey, loadLists, onKeyChange, onModelChange, settings, snapshot } from "../common/settings.js";
import { Talk } from "../voice/talk.js";
import { addActions } from "./actions.js";
import { Attachments } from "./attachments.js";
import { articles, clear, setBusy } from "./bubbles.js";
import { Conversation } from "../conversations/conversation.js";
import { ConversationList } from "../conversations/conversation-list.js";
import { draftFiles, draftText, keepFiles, keepText } from "./draft.js";
import { enterHint, isTouch, sends } from "./enter-key.js";
import { generate } from "./generation.js";
import { Lightbox } from "./lightbox.js";
import "../models/pull.js";
import { editMessage } from "./message-editor.js";
import { showMessage } from "./message-view.js";
import { showModels } from "../models/model-cards.js";
import { readAloud, stopReading } from "./read-aloud.js";
import { read, write } from "../conversations/store.js";
import { showSuggestions } from "./suggestions.js";

const $ = (id) => document.getElementById(id);
const message = $("message");
const SAVE_DELAY = 500; // ms
const SPOKEN_DELAY = 2000; // ms; spoken words change without events
const CURRENT = "motet-conversation"; // the id of the one that a reload opens
const UNSETTLED = ["starting", "loading"]; // of models whose state will change by itself

let conversation = new Conversation();
let running = null; // AbortController of the streaming reply
let replied = Promise.resolve(); // resolves when it has ended
let listing = 0; // timer of the next reading of the lists
let listProblem = ""; // the message that the latest failed one has shown
let abilities = ""; // what the models can do, as shown
let stopWatching = () => {}; // cancels the pending save of the conversation

const list = new ConversationList({ open, closed: erased, renamed: rename, problem: showError });
const talk = new Talk(settledHistory, showError, talked);
const attachments = new Attachments(showError, keepFiles);
new Lightbox(() => Boolean(settings().imageModel), (edit) => draw(edit));

onKeyChange(() => {
  abilities = "";
  loadModels();
});
onModelChange(showAbilities);
$("draw").addEventListener("click", () => draw({ prompt: message.value.trim() }));
$("film").addEventListener("click", () => film(message.value.trim()));
$("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  send();
});
$("stop").addEventListener("click", () => running?.abort());
$("new").addEventListener("click", newChat);
message.addEventListener("input", () => setDraft(message.value));
message.addEventListener("keydown", (event) => {
  if (!sends(event)) return;
  event.preventDefault();
  send();
});
addEventListener("pagehide", () => save(conversation));
setInterval(() => talk.on && conversation.touch(), SPOKEN_DELAY);
$("stats").textContent = enterHint();
watch();
loadModels();
restore();

// Reads the lists of models and voices, again while that fails or models are being loaded.
async function loadModels(tries = 60) {
  clearTimeout(listing);
  const again = (delay) => tries > 0 && (listing = setTimeout(() => loadModels(tries - 1), delay));
  try {
    const models = await loadLists();
    showModels(models);
    const able = JSON.stringify(models.map(({ loading, ...fixed }) => fixed));
    if (able !== abilities) showAbilities();
    abilities = able;
    if ($("error").textContent === listProblem) showError("");
    if (models.some(({ status }) => UNSETTLED.includes(status))) again(2000);
  } catch (error) {
    showError((listProblem = error.message));
    if (error.status === 401) askForKey();
    else again(1000);
  }
}

// Shows the controls that the chosen model and this server support.
function showAbilities() {
  const { imageModel, videoModel, acceptsImages, acceptsSounds, supportsTools, asrModel, speechModel, key } = settings();
  attachments.enable({ images: acceptsImages, sounds: acceptsSounds, asrModel, key });
  talk.check();
  $("draw").hidden = !imageModel;
  $("film").hidden = !videoModel;
  const abilities = { draws: imageModel, films: videoModel, sees: acceptsImages, talks: (asrModel || acceptsSounds) && speechModel };
  showSuggestions(abilities, {
    send: (text, picture) => {
      if (picture) attachments.add(picture);
      setDraft(text);
      send();
    },
    draw: (text) => {
      setDraft(text);
      if (supportsTools) send();
      else draw({ prompt: text });
    },
    film,
    talk: () => $("talk").click(),
  });
  if (!running && !talk.on) showAllActions();
}

// ------------------------------------------------------------------------------------------------ conversations
// Opens the conversation of the last visit, with the message that was being written.
async function restore() {
  if (draftText() && !message.value) setDraft(draftText());
  const files = await draftFiles();
  if (files.length && attachments.isEmpty) attachments.set(files);
  try {
    const id = sessionStorage.getItem(CURRENT) ?? localStorage.getItem(CURRENT);
    const stored = id && conversation.isEmpty && (await read(id));
    if (stored && conversation.isEmpty && !running) enter(stored);
    await list.refresh(conversation.id);
  } catch (error) {
    showError(`Conversations cannot be stored in this browser: ${error.message}`);
  }
}

async function open(id) {
  await leave();
  const stored = await read(id);
  if (stored) enter(stored);
  showError("");
  await list.refresh(conversation.id);
  if (!isTouch()) message.focus(); // it would open the keyboard of a touch screen
}

function enter(next) {
  conversation = next;
  remember(next);
  if (next.settings.model !== undefined) applySnapshot(next.settings);
  $("stats").textContent = next.isEmpty ? enterHint() : "";
  render();
  watch();
}

// Makes it the conversation that a reload opens.
function remember({ id }) {
  for (const store of [sessionStorage, localStorage]) store.setItem(CURRENT, id);
}

// Ends what runs, and saves it.
async function leave() {
  const [left, stop] = [conversation, stopWatching];
  running?.abort();
  stopReading();
  talk.end();
  await replied;
  stop();
  await save(left);
}

// Leaves a conversation that was deleted.
function erased() {
  conversation.erased = true;
  newChat();
}

async function newChat() {
  const left = leave(); // what it ends still belongs to the old conversation
  attachments.set([]);
  enter(new Conversation());
  showError("");
  if (!isTouch()) message.focus();
  loadModels();
  await left;
}

async function rename(id, title) {
  const target = id === conversation.id ? conversation : await read(id);
  target.title = title;
  await write(target);
}

// Saves the conversation soon after each change.
function watch() {
  const current = conversation;
  let waiting = 0;
  const later = () => {
    waiting = 0;
    save(current).catch((error) => showError(`The conversation could not be stored: ${error.message}`));
  };
  current.onChange(() => (waiting ||= setTimeout(later, SAVE_DELAY)));
  stopWatching = () => clearTimeout(waiting);
}

async function save(changed) {
  if (changed.isEmpty || changed.erased) return;
  if (changed === conversation) {
    changed.settings = snapshot();
    remember(changed); // the first one of a visit was not entered
  }
  await write(changed);
  await list.refresh(conversation.id);
}

// Shows the conversation anew.
function render() {
  clear();
  for (const node of shownMessages()) showMessage(node, askAbout);
  showAllActions();
}

// Returns the messages that have an article. Speech without words has none.
const shownMessages = () => conversation.path.filter(({ content, images, files, drawn, film }) => content || images?.length || files?.length || drawn?.length || film);

function showAllActions() {
  const shown = articles();
  for (const [index, node] of shownMessages().entries()) if (shown[index]) addActions(shown[index], node, conversation.versions(node), actions());
}

function actions() {
  const { speechModel } = settings();
  const idle = (work) => (...rest) => (running || talk.on ? showError("Wait for the reply, or stop it first.") : work(...rest));
  const aloud = (node, article, button) => {
    const text = article.querySelector(".text").innerText;
    readAloud(text, button, settings()).catch((error) => showError(error.message));
  };
  return {
    Edit: idle(edit),
    Regenerate: idle(regenerate),
    Branch: idle(branch),
    select: idle(select),
    ...(speechModel ? { "Read aloud": aloud } : {}),
    Trace: ({ request }) => (location.hash = `stack/${encodeURIComponent(request)}`),
  };
}

function select(node) {
  conversation.select(node);
  render();
}

async function branch(node) {
  const made = conversation.branch(node);
  await leave();
  enter(made);
  await save(made);
}

async function regenerate(node) {
  conversation.rewind(node);
  render();
  await answer();
}

// Edits a message; sending it makes another version, with its own reply.
function edit(node, article) {
  const { role, images, files, drawing, mask, filming } = node;
  editMessage(article, node.content, async (content) => {
    if (running) return showError("Wait for the reply, or stop it first.");
    conversation.rewind(node);
    conversation.push({ role, content, images, files, drawing, mask, filming });
    render();
    await answer();
  });
}

// ------------------------------------------------------------------------------------------------------ messages
async function send() {
  const text = message.value.trim();
  if (running || (!text && attachments.isEmpty)) return;
  if (talk.on && !attachments.isEmpty) return showError("Files cannot be sent in a spoken conversation: end it first.");
  const current = conversation;
  const complete = await attachments.settled;
  if (!complete || running || current !== conversation || message.value.trim() !== text) return; // sent or changed meanwhile
  if (!text && attachments.isEmpty) return;
  const items = attachments.takeAll();
  const images = items.filter(({ kind }) => kind === "picture").map(({ url }) => url);
  const files = items.filter(({ kind }) => kind !== "picture");
  ask({ role: "user", content: text, images, files });
  if (talk.on) talk.sendText(text);
  else await answer();
  if (!isTouch()) message.focus();
}

// Adds the user's message and empties the input.
function ask(node) {
  setDraft("");
  showError("");
  conversation.push(node);
  showMessage(node, askAbout);
}

// Generates a picture from a prompt, or edits `source` where `mask` is transparent. It is not part of the conversation that the
// model sees until it is attached to a message.
async function draw({ prompt, source, mask }) {
  if (running) return;
  if (talk.on) return showError("Pictures cannot be drawn in a spoken conversation: end it first.");
  if (!prompt) return showError("Enter a description of the picture first.");
  ask({ role: "user", content: prompt, drawing: true, images: source ? [source] : [], ...(mask ? { mask } : {}) });
  await answer();
}

// Has a video made from a prompt. The model does not see it.
async function film(prompt) {
  if (running) return;
  if (talk.on) return showError("Videos cannot be made in a spoken conversation: end it first.");
  if (!prompt) return showError("Enter a description of the video first.");
  ask({ role: "user", content: prompt, filming: true });
  await answer();
}

const askAbout = (url) => (attachments.acceptsPictures ? () => attachments.add(url) : null);

// Generates the reply to the last message. An unanswered message goes back to the input.
function answer() {
  replied = generateReply();
  return replied;
}

async function generateReply() {
  const current = conversation; // "New chat" may replace it meanwhile
  const controller = (running = new AbortController());
  showBusy(true);
  showError("");
  const status = (line) => current === conversation && ($("stats").textContent = line);
  try {
    const error = await generate(current, controller.signal, status, askAbout);
    if (error && current === conversation) showError(error.message);
  } finally {
    if (running === controller) running = null;
    showBusy(false);
    await save(current);
  }
  if (current !== conversation) return;
  const last = current.path.at(-1);
  if (last?.role === "user") takeBack(last);
  showAllActions();
}

function takeBack({ content, images = [], files = [], drawing }) {
  conversation.pop();
  articles().at(-1)?.remove();
  if (conversation.path.length === 0) render();
  if (!message.value) setDraft(content);
  const pictures = drawing ? [] : images.map((url) => ({ kind: "picture", name: "picture", url }));
  if (attachments.isEmpty) attachments.set([...pictures, ...files]);
}

// Returns the messages after ending the streaming reply.
async function settledHistory() {
  running?.abort();
  await replied;
  return conversation;
}

// Saves what was said when a spoken conversation ends.
function talked() {
  conversation.touch();
  showAllActions();
}

function showBusy(busy) {
  setBusy(busy);
  $("send").hidden = busy;
  $("stop").hidden = !busy;
  $("draw").disabled = busy;
  $("film").disabled = busy;
}

function showError(text) {
  $("error").textContent = text;
  $("error").hidden = !text;
}

// Sets the text of the input, which a reload keeps.
function setDraft(text) {
  if (message.value !== text) message.value = text;
  keepText(text);
  message.style.height = "auto";
  message.style.height = `${Math.min(message.scrollHeight + 2, 200)}px`;
}
