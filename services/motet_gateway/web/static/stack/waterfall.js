// Shows where one reply spent its time: a row per service and stage.

import { element } from "../common/elements.js";
import { duration, plural } from "./figures.js";
import { stageWords } from "./words.js";

// `reply`: of /metrics/replies.
export function waterfall(reply) {
  const total = Math.max(reply.total, 1e-9);
  const body = element("tbody", {}, ...reply.spans.map((span) => row(span.name, span.start, span.seconds, total)));
  if (reply.first !== null) body.append(row("first token", reply.first, null, total));
  const head = element("tr", {}, ...["Stage", "What it does", "Time", `Of ${duration(total)}`].map((name) => element("th", { scope: "col" }, name)));
  const caption = element("caption", {}, captionText(reply));
  return element("table", { class: "waterfall" }, caption, element("thead", {}, head), body);
}

// Returns a row with a bar, or a mark without `seconds`.
function row(name, start, seconds, total) {
  const role = name.split(".")[0];
  const bar = element("i", { class: seconds === null ? "mark" : "bar" });
  bar.style.left = `${Math.min((start / total) * 100, 99.5)}%`;
  if (seconds !== null) bar.style.width = `${Math.min((seconds / total) * 100, 100 - (start / total) * 100)}%`;
  return element(
    "tr",
    { "data-service": role, class: name.includes(".") ? "stage" : "whole" },
    element("th", { scope: "row" }, name.replace(`${role}.`, "")),
    element("td", { class: "words" }, stageWords(name)),
    element("td", {}, duration(seconds ?? start)),
    element("td", { "aria-hidden": "true" }, element("div", { class: "track" }, bar)),
  );
}

function captionText({ request, prompt_tokens: read, cached_tokens: cached, tokens, moves }) {
  const parts = [request || "a realtime reply", `${plural(read, "token")} in (${cached} cached), ${tokens} out`];
  return [...parts, ...(moves ? [`moved ${moves}×`] : [])].join(" · ");
}
