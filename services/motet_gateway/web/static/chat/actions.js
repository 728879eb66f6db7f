// Adds the buttons of a message: copy, read aloud, edit, regenerate, branch, its trace, and the choice between its versions.

import { element, svg } from "../common/elements.js";
import { copyText } from "./clipboard.js";

const PATHS = {
  Copy: "M9 9h11v11H9zM5 15V4h11",
  "Read aloud": "M4 10v4h4l5 4V6L8 10zM17 9a4 4 0 0 1 0 6",
  Edit: "M4 20l1-4L16 5l3 3L8 19zM14 7l3 3",
  Regenerate: "M19 12a7 7 0 1 1-2-5M19 4v4h-4",
  Trace: "M4 6h7M8 12h8M13 18h7",
  Branch: "M6 4v16M6 14c8 0 10-2 11-7M14 9l3-3 3 3",
  "Previous version": "M14 6l-6 6 6 6",
  "Next version": "M10 6l6 6-6 6",
};

export function iconButton(label, work) {
  const icon = svg("svg", { viewBox: "0 0 24 24", width: 18, height: 18, "aria-hidden": "true" }, svg("path", { d: PATHS[label] }));
  const button = element("button", { type: "button", class: "icon", "aria-label": label, title: label }, icon);
  button.addEventListener("click", () => work(button));
  return button;
}

// `work`: functions by label, called with the message; `versions`: of it, of which one is shown.
export function addActions(article, node, versions, work) {
  article.querySelector(":scope > .actions")?.remove();
  const labels = node.role === "user" ? ["Copy", "Edit", "Branch"] : ["Copy", "Read aloud", "Regenerate", "Branch", "Trace"];
  const buttons = labels
    .filter((label) => (label === "Copy" && node.content) || work[label])
    .filter((label) => (label === "Trace" ? node.request : node.content || label === "Regenerate" || label === "Branch"))
    .map((label) => iconButton(label, label === "Copy" ? (button) => copyText(node.content, button) : (button) => work[label](node, article, button)));
  if (versions.length > 1) buttons.unshift(...versionButtons(node, versions, work.select));
  article.append(element("div", { class: "actions", role: "group", "aria-label": "Message" }, ...buttons));
}

function versionButtons(node, versions, select) {
  const at = versions.indexOf(node);
  const step = (label, to) => {
    const button = iconButton(label, () => select(versions[to]));
    button.disabled = !versions[to];
    return button;
  };
  const place = element("span", { class: "version", "aria-label": `Version ${at + 1} of ${versions.length}`, role: "img" });
  place.dataset.text = `${at + 1}/${versions.length}`; // drawn by the style sheet: it is no text of the message
  return [step("Previous version", at - 1), place, step("Next version", at + 1)];
}
