// Alt and a letter: what an element's aria-keyshortcuts names does what a click on it does, where it is to be seen.

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
  const wanted = ({ keys }) => `Key${keys.at(-1)}` === event.code;
  const found = all().find((one) => wanted(one) && one.target.checkVisibility());
  if (!found) return;
  event.preventDefault();
  if (found.target.matches(FIELDS)) found.target.focus();
  else found.target.click();
});

// A menu that is open closes where somebody presses elsewhere, or at Escape, which takes the keyboard back to it.
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
