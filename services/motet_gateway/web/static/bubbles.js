// The conversation as it is seen: one article per message. Text and pictures; nothing a model says becomes markup.

const log = document.getElementById("log");
const welcome = document.getElementById("welcome");

// The paragraph of a new message at the end, below its pictures. `role`: user or assistant.
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

// Makes a change to what is shown; whoever looks at the end goes on looking at the end.
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

// Screen readers are quiet while the conversation is heard anyway.
export function setSpoken(spoken) {
  log.setAttribute("aria-live", spoken ? "off" : "polite");
}
