// Run the cases of a client, each by itself, and print as JSON what came out.

import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { dirname, join } from "node:path";

export const URL_ = process.env.MOTET_URL ?? "http://127.0.0.1:8000";
export const V1 = `${URL_}/v1`;
export const KEY = "none";
export const MODEL = "pocket-chat";
export const QUESTION = "There is a red circle, a blue square and a green star. What do you see?";
export const ANSWER = "red circle"; // is in the answer
export const WISH = "Draw two red circles."; // upon which the model calls the tool `draw`
export const TOOL_SCHEMA = {
  type: "object",
  properties: { prompt: { type: "string" } },
  required: ["prompt"],
};

// Throws unless `value` is truthy.
export function check(value, what) {
  if (!value) throw new Error(what);
}

// The version of an installed package, whose manifest it may not export.
function versionOf(name) {
  let folder = dirname(createRequire(join(process.cwd(), "x.mjs")).resolve(name));
  for (;;) {
    try {
      const found = JSON.parse(readFileSync(join(folder, "package.json"), "utf8"));
      if (found.name === name && found.version) return found.version;
    } catch {
      // further up
    }
    folder = dirname(folder);
  }
}

// Runs `cases`, functions by name; the last line printed is the result.
export async function main(name, cases) {
  const found = [];
  for (const [title, run] of Object.entries(cases)) {
    let error = "";
    let timer;
    const late = new Promise((_, reject) => {
      timer = setTimeout(() => reject(new Error("it took more than 60 s")), 60_000);
    });
    try {
      await Promise.race([run(), late]);
    } catch (problem) {
      console.error(problem);
      error = `${problem.name}: ${problem.message}`.slice(0, 300);
    }
    clearTimeout(timer);
    found.push({ name: title, error });
  }
  console.log("\n" + JSON.stringify({ version: versionOf(name), cases: found }));
  process.exit(0);
}
