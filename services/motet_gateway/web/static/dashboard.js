// The stack as it is now: looks at it every second or two while it is shown, and has each part draw what was seen.

import { readDoctor, readReplies, readStack } from "./api.js";
import { write } from "./elements.js";
import { plural } from "./figures.js";
import { Findings } from "./findings.js";
import { Instances } from "./instances.js";
import { Looks } from "./looks.js";
import { Replies } from "./replies.js";
import { askForKey, onKeyChange, settings } from "./settings.js";
import { Tiles } from "./tiles.js";
import { onView, shown } from "./views.js";

const $ = (id) => document.getElementById(id);
const EVERY = 1500; // ms
const FIELDS = ["window", "first", "between", "price"];

const looks = new Looks();
const tiles = new Tiles($("tiles"));
const instances = new Instances($("instances"));
const findings = new Findings($("finding-list"), $("healthy"));
const replies = new Replies($("reply-list"), $("no-replies"));

let timer = 0;
let round = 0; // answers of an earlier one come too late
let last = []; // the replies that were seen last
const paused = () => $("pause").getAttribute("aria-pressed") === "true";

onView(restart);
onKeyChange(restart);
document.addEventListener("visibilitychange", restart);
$("pause").addEventListener("click", pause);
$("give-key").addEventListener("click", askForKey);
$("order").addEventListener("change", drawReplies);
for (const name of FIELDS) {
  $(name).value = localStorage.getItem(`motet-${name}`) ?? $(name).value;
  $(name).addEventListener("change", () => keep(name));
}

function pause() {
  $("pause").setAttribute("aria-pressed", String(!paused()));
  restart();
}

function keep(name) {
  if (!$(name).reportValidity()) return;
  localStorage.setItem(`motet-${name}`, $(name).value);
  restart();
}

function restart() {
  clearTimeout(timer);
  round += 1;
  if (shown() === "stack" && !document.hidden && !paused()) look(round);
}

async function look(mine) {
  const { key } = settings();
  const { price, ...query } = limits();
  try {
    const seen = await Promise.all([readStack(key, query), readReplies(key), readDoctor(key)]);
    if (mine === round) draw(...seen);
  } catch (error) {
    if (mine === round) fail(error);
  }
  if (mine === round) timer = setTimeout(() => look(mine), EVERY);
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

function draw(stack, seen, told) {
  looks.add(stack);
  last = seen;
  showProblem("");
  $("seen").hidden = false;
  write($("pulse"), pulse(stack.instances));
  tiles.draw(looks, limits());
  instances.draw(looks);
  findings.draw(told);
  drawReplies();
}

function drawReplies() {
  replies.draw(last, $("order").value);
}

// One line for all: screen readers hear it when it changes.
function pulse(all) {
  const odd = all.filter(({ state }) => state !== "ready");
  if (!odd.length) return `${plural(all.length, "instance")}, all ready`;
  const told = odd.map(({ role, state }) => `${role} ${state}`);
  return `${plural(all.length, "instance")}; ${[...new Set(told)].join(", ")}`;
}

function fail(error) {
  const keyed = error.status === 401 || error.status === 403;
  if (keyed) $("seen").hidden = true; // what another key was shown
  if (keyed) looks.clear();
  write($("pulse"), "");
  showProblem(error.message, keyed);
}

function showProblem(text, keyed = false) {
  write($("stack-problem"), text);
  $("stack-problem").hidden = !text;
  $("give-key").hidden = !keyed;
}
