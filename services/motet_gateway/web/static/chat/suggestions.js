// Shows ideas in an empty conversation, those that this server can do: each draws, films, sees, talks or writes with a click.

import { element } from "../common/elements.js";

const list = document.getElementById("suggestions");
const SIDE = 256; // px of the picture that is looked at

// Of each: what it needs of {draws, films, sees, talks}, and what it does with `work`.
const IDEAS = [
  { kind: "Draw", needs: "draws", text: "Draw two red circles and a blue square.", run: (work, text) => work.draw(text) },
  { kind: "Film", needs: "films", text: "A red circle moves from left to right, a blue square stands still.", run: (work, text) => work.film(text) },
  { kind: "See", needs: "sees", text: "What is in this picture?", run: (work, text) => work.send(text, shapes()) },
  { kind: "Talk", needs: "talks", text: "Have a spoken conversation.", run: (work) => work.talk() },
  { kind: "Count", text: "There are two red circles and a blue square. How many circles are there?", run: (work, text) => work.send(text) },
  { kind: "Ask", text: "What can you do?", run: (work, text) => work.send(text) },
];

// `abilities`: {draws, films, sees, talks}; `work`: {send(text, picture), draw(text), film(text), talk()}.
export function showSuggestions(abilities, work) {
  const ideas = IDEAS.filter(({ needs }) => !needs || abilities[needs]);
  const buttons = ideas.map(({ kind, text, run }) => {
    const button = element("button", { type: "button", class: "secondary" }, element("b", {}, kind), " ", text);
    button.addEventListener("click", () => run(work, text));
    return element("li", {}, button);
  });
  list.replaceChildren(...buttons);
}

// Returns a picture of a red circle and a blue square as a data URI.
function shapes() {
  const canvas = Object.assign(document.createElement("canvas"), { width: SIDE, height: SIDE });
  const pen = canvas.getContext("2d");
  pen.fillStyle = "white";
  pen.fillRect(0, 0, SIDE, SIDE);
  pen.fillStyle = "red";
  pen.beginPath();
  pen.arc(80, 128, 48, 0, 2 * Math.PI);
  pen.fill();
  pen.fillStyle = "blue";
  pen.fillRect(150, 84, 88, 88);
  return canvas.toDataURL("image/png");
}
