// Messages to begin with, on the empty page: a click sends one.

import { element } from "./elements.js";

const list = document.getElementById("ideas");
const IDEAS = [
  "There are two red circles and a blue square. How many circles are there?",
  "Here is a green star. What colour is the star?",
  "What can you do?",
];

// `send`: is given the text.
export function offerIdeas(send) {
  const buttons = IDEAS.map((idea) => {
    const button = element("button", { type: "button", class: "quiet" }, idea);
    button.addEventListener("click", () => send(idea));
    return element("li", {}, button);
  });
  list.replaceChildren(...buttons);
}
