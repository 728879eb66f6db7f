// Handles Alt+letter shortcuts: clicks the visible element whose aria-keyshortcuts names the keys.

import { element } from "./elements.js";

const $ = (id) => document.getElementById(id);
const FIELDS = "textarea, input, select";

function all() {
  const keyed = [...document.querySelectorAll('[aria-keyshortcuts^="Alt+"]')];
  return keyed.map((target) => ({ target, keys: target.getAttribute("aria-keyshortcuts") }));
}

document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return close();
  if (!event.altKey || event.ctrlKey || event.metaKey) return;
  const matches = ({ keys }) => `Key${keys.at(-1)}` === event.code;
  const match = all().find((one) => matches(one) && one.target.checkVisibility());
  if (!match) return;
  event.preventDefault();
  if (match.target.matches(FIELDS)) match.target.focus();
  else match.target.click();
});

// An open menu closes on a press outside it, or on Escape, which returns the focus to it.
document.addEventListener("pointerdown", ({ target }) => {
  for (const menu of document.querySelectorAll("details.menu[open]")) if (!menu.contains(target)) menu.open = false;
});

function close() {
  for (const menu of document.querySelectorAll("details.menu[open]")) {
    menu.open = false;
    menu.querySelector("summary").focus();
  }
}

const line = ({ target, keys }) =>
  element("div", {}, element("dt", {}, element("kbd", {}, keys)), element("dd", {}, target.dataset.shortcut ?? target.textContent.trim()));
$("shortcuts").replaceChildren(...all().map(line));
