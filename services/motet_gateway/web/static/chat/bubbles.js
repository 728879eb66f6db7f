// Shows the conversation: one article per message, with text and pictures below one another.

const log = document.getElementById("log");
const welcome = document.getElementById("welcome");

// Appends a message and returns the element of its text, below its pictures. `role`: user or assistant.
export function bubble(role, ...pictures) {
  welcome.hidden = true;
  const article = document.createElement("article");
  article.className = role;
  article.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const text = document.createElement(role === "user" ? "p" : "div");
  text.className = "text";
  article.append(...pictures, text);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return text;
}

// Returns the articles that are shown.
export const articles = () => [...log.querySelectorAll("article")];

// Applies a change and keeps the end in view if it was.
export function show(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

export function remove(text) {
  text.closest("article")?.remove();
}

export function clear() {
  log.replaceChildren(welcome);
  welcome.hidden = false;
}

export function setBusy(busy) {
  log.setAttribute("aria-busy", String(busy));
}

// Keeps screen readers quiet during a spoken conversation.
export function setSpoken(spoken) {
  log.setAttribute("aria-live", spoken ? "off" : "polite");
}
