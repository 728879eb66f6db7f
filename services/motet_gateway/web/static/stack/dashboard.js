// Polls the state of the stack while its view is shown, and updates the view's parts.

import { readDoctor, readReplies, readStack } from "../common/api.js";
import { setText } from "../common/elements.js";
import { duration, plural } from "./figures.js";
import { Findings } from "./findings.js";
import { Flow } from "./flow.js";
import { Instances } from "./instances.js";
import { StackHistory } from "./stack-history.js";
import { Replies } from "./replies.js";
import { askForKey, onKeyChange, settings } from "../common/settings.js";
import { Tiles } from "./tiles.js";
import { detail, onView, shown } from "../common/views.js";

const $ = (id) => document.getElementById(id);
const EVERY = 1500; // ms
const FIELDS = ["window", "first", "between", "price"];

const history = new StackHistory();
const tiles = new Tiles($("tiles"));
const flow = new Flow($("flow"));
const instances = new Instances($("instances"));
const findings = new Findings($("finding-list"), $("no-findings"));
const replies = new Replies($("reply-list"), $("no-replies"));

let timer = 0;
let generation = 0; // responses of an earlier generation are ignored
let lastReplies = []; // from the latest poll
let wanted = ""; // the request whose trace is to be opened
const paused = () => $("pause").getAttribute("aria-pressed") === "true";

onView(() => {
  wanted = detail();
  $("no-trace").hidden = true;
  restart();
});
addEventListener("resize", () => history.latest && shown() === "stack" && flow.draw(history));
onKeyChange(restart);
document.addEventListener("visibilitychange", restart);
$("pause").addEventListener("click", pause);
$("enter-key").addEventListener("click", askForKey);
$("order").addEventListener("change", drawReplies);
$("slowest").addEventListener("click", () => openTrace($("slowest").dataset.request));
for (const name of FIELDS) {
  $(name).value = localStorage.getItem(`motet-${name}`) ?? $(name).value;
  $(name).addEventListener("change", () => saveLimit(name));
}

function pause() {
  $("pause").setAttribute("aria-pressed", String(!paused()));
  restart();
}

function saveLimit(name) {
  if (!$(name).reportValidity()) return;
  localStorage.setItem(`motet-${name}`, $(name).value);
  restart();
}

function restart() {
  clearTimeout(timer);
  generation += 1;
  if (shown() === "stack" && !document.hidden && !paused()) poll(generation);
}

async function poll(polled) {
  const { key } = settings();
  const { price, ...query } = limits();
  try {
    const fetched = await Promise.all([readStack(key, query), fetchReplies(key), readDoctor(key)]);
    if (polled === generation) draw(...fetched);
  } catch (error) {
    if (polled === generation) fail(error);
  }
  if (polled === generation) timer = setTimeout(() => poll(polled), EVERY);
}

// Returns the latest replies, and an earlier one whose trace is wanted.
async function fetchReplies(key) {
  const [latest, asked] = await Promise.all([readReplies(key), wanted ? readReplies(key, wanted) : []]);
  return [...latest, ...asked.filter(({ request, ended }) => !latest.some((one) => one.request === request && one.ended === ended))];
}

function limits() {
  const number = (name, fallback) => ($(name).validity.valid && $(name).valueAsNumber > 0 ? $(name).valueAsNumber : fallback);
  return {
    window: Number($("window").value),
    first: number("first", 1),
    between: number("between", 100) / 1000,
    price: number("price", null),
  };
}

function draw(stack, fetched, doctorFindings) {
  history.add(stack);
  lastReplies = fetched;
  showProblem("");
  $("stack-data").hidden = false;
  setText($("stack-summary"), summary(stack.instances));
  tiles.draw(history, limits());
  instances.draw(history);
  flow.draw(history);
  findings.draw(doctorFindings);
  drawReplies();
  if (wanted) openTrace(wanted);
}

function drawReplies() {
  replies.draw(lastReplies, $("order").value, wanted);
  const slowest = lastReplies.filter(({ request }) => request).reduce((most, one) => (one.total > (most?.total ?? 0) ? one : most), null);
  $("slowest").hidden = !slowest;
  if (!slowest) return;
  $("slowest").dataset.request = slowest.request;
  setText($("slowest"), `Open the slowest, ${duration(slowest.total)}`);
}

// Opens the trace of a reply, whether it is listed or not.
function openTrace(request) {
  wanted = request;
  drawReplies();
  wanted = "";
  $("no-trace").hidden = replies.open(request);
}

// Summarizes the instances in one line, which screen readers announce when it changes.
function summary(all) {
  const notReady = all.filter(({ state }) => state !== "ready");
  if (!notReady.length) return `${plural(all.length, "instance")}, all ready`;
  const states = notReady.map(({ role, state }) => `${role} ${state}`);
  return `${plural(all.length, "instance")}; ${[...new Set(states)].join(", ")}`;
}

function fail(error) {
  const unauthorized = error.status === 401 || error.status === 403;
  if (unauthorized) $("stack-data").hidden = true; // it was fetched with another key
  if (unauthorized) history.clear();
  setText($("stack-summary"), "");
  showProblem(error.message, unauthorized);
}

function showProblem(text, unauthorized = false) {
  setText($("stack-problem"), text);
  $("stack-problem").hidden = !text;
  $("enter-key").hidden = !unauthorized;
}
