// Downloads models from the hub onto the server, with their progress. A download ends with the page, and a later one resumes it.

import { ApiError, pullModel } from "../common/api.js";
import { element } from "../common/elements.js";
import { settings } from "../common/settings.js";

const $ = (id) => document.getElementById(id);

$("pull").addEventListener("submit", (event) => {
  event.preventDefault();
  const name = $("pull-name").value.trim();
  if (!name) return;
  $("pull-name").value = "";
  pull(name);
});

async function pull(name) {
  const stop = new AbortController();
  const bar = element("progress", { "aria-label": `Download of ${name}` });
  const state = element("span", { class: "loading", role: "status" }, "asking the hub…");
  const cancel = element("button", { type: "button", class: "secondary small", "aria-label": `Cancel the download of ${name}` }, "Cancel");
  const row = element("li", {}, element("b", {}, name), state, cancel, bar);
  cancel.addEventListener("click", () => stop.abort());
  $("pulls").prepend(row);
  try {
    for await (const { completed, total } of pullModel(name, settings().key, stop.signal)) {
      if (!total) continue;
      [bar.max, bar.value] = [total, completed];
      state.textContent = `${Math.floor((100 * completed) / total)} % of ${bytes(total)}`;
    }
    state.replaceChildren("downloaded; serve it with ", element("code", {}, `motet up ${name}`));
  } catch (error) {
    if (!(error instanceof ApiError) && error.name !== "AbortError") throw error;
    state.classList.add("failed");
    state.textContent = stop.signal.aborted ? "cancelled; the next download goes on from here" : error.message;
  } finally {
    bar.remove();
    cancel.remove();
  }
}

function bytes(count) {
  const units = ["B", "kB", "MB", "GB", "TB"];
  const power = Math.min(Math.floor(Math.log10(Math.max(count, 1)) / 3), units.length - 1);
  return `${(count / 1000 ** power).toPrecision(3)} ${units[power]}`;
}
