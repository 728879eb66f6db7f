// Shows the conversation: one article per message, with text and pictures. Model output never becomes markup.

const log = document.getElementById("log");
const welcome = document.getElementById("welcome");

// Appends a message and returns its paragraph, below its pictures. `role`: user or assistant.
export function bubble(role, ...pictures) {
  welcome.hidden = true;
  const article = document.createElement("article");
  article.className = role;
  article.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const text = document.createElement("p");
  article.append(...pictures, text);
  log.append(article);
  log.scrollTop = log.scrollHeight;
  return text;
}

// Applies a change and keeps the end in view if it was.
export function show(change) {
  const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 60;
  change();
  if (atEnd) log.scrollTop = log.scrollHeight;
}

export function remove(text) {
  text.parentElement?.remove();
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
