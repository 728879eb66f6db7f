// Shows the view that the address names after its `#`, so that links and the back button work: `#stack/DETAIL` is the stack, with
// something of it opened.

const $ = (id) => document.getElementById(id);
const VIEWS = { chat: "Motet", stack: "Stack · Motet" }; // page title by section id
const DEFAULT_VIEW = "chat";

const watchers = [];

const parts = () => location.hash.slice(1).split("/");

export const shown = () => (parts()[0] in VIEWS ? parts()[0] : DEFAULT_VIEW);

// Returns what the address names within the view; "" without it.
export function detail() {
  try {
    return decodeURIComponent(parts()[1] ?? "");
  } catch {
    return ""; // an address that was typed
  }
}

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
