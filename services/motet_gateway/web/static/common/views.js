// Shows the view that the address names after its `#`, so that links and the back button work.

const $ = (id) => document.getElementById(id);
const VIEWS = { chat: "Motet", stack: "Stack · Motet" }; // page title by section id
const DEFAULT_VIEW = "chat";

const watchers = [];

export const shown = () => (location.hash.slice(1) in VIEWS ? location.hash.slice(1) : DEFAULT_VIEW);

// Calls `work` with the id of the view, now and after each change.
export function onView(work) {
  watchers.push(work);
  work(shown());
}

// Returns the element that gets the focus when a view opens.
const initialFocus = () => $(shown()).querySelector("[data-focus]");

function show(moved) {
  const view = shown();
  document.title = VIEWS[view];
  for (const id of Object.keys(VIEWS)) $(id).hidden = id !== view;
  for (const part of document.querySelectorAll("[data-view]")) part.hidden = part.dataset.view !== view;
  for (const link of document.querySelectorAll("nav a")) {
    if (link.hash === `#${view}`) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (moved) initialFocus().focus({ preventScroll: true });
  for (const work of watchers) work(view);
}

document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();
  initialFocus().focus();
});
addEventListener("hashchange", () => show(true));
show(false);
