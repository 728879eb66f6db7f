// Which part of the page is shown: the one that the address names after its `#`, so that links and the way back work.

const $ = (id) => document.getElementById(id);
const VIEWS = { chat: "Motet", stack: "Stack · Motet" }; // ids of sections, and the page's title then
const FIRST = "chat";

const watchers = [];

export const shown = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : FIRST);

// Calls `work` with the id of the view, now and each time that another one is shown.
export function onView(work) {
  watchers.push(work);
  work(shown());
}

// Where the keyboard begins in a view.
const beginning = () => $(shown()).querySelector("[data-begin]");

function show(moved) {
  const view = shown();
  document.title = VIEWS[view];
  for (const id of Object.keys(VIEWS)) $(id).hidden = id !== view;
  for (const part of document.querySelectorAll("[data-view]")) part.hidden = part.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) beginning().focus({ preventScroll: true });
  for (const work of watchers) work(view);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  beginning().focus();
});
addEventListener("hashchange", () => show(true));
show(false);
