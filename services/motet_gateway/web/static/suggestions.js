// Shows suggested messages in an empty conversation; a click sends one.

import { element } from "./elements.js";

const list = document.getElementById("suggestions");
const SUGGESTIONS = [
  "There are two red circles and a blue square. How many circles are there?",
  "Here is a green star. What colour is the star?",
  "What can you do?",
];

// `send`: gets the text.
export function showSuggestions(send) {
  const buttons = SUGGESTIONS.map((suggestion) => {
    const button = element("button", { type: "button", class: "secondary" }, suggestion);
    button.addEventListener("click", () => send(suggestion));
    return element("li", {}, button);
  });
  list.replaceChildren(...buttons);
}
