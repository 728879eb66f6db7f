// Chat with a model over NATS. The variables are those of `motet credentials environment`.
//
//     npm install
//     eval "$(motet credentials environment)"
//     node chat.mjs "There is a red circle and a blue square. What do you see?"

import { readFileSync } from "node:fs";
import { Caller, MotetError } from "./motet.mjs";

const { MOTET_NATS_URL, MOTET_NATS_CREDENTIALS, MOTET_MODEL = "pocket-chat" } = process.env;
const question = process.argv.slice(2).join(" ");
if (!question || !MOTET_NATS_URL || !MOTET_NATS_CREDENTIALS) {
  console.error("usage: node chat.mjs TEXT, with the variables of `motet credentials environment`");
  process.exit(2);
}

const caller = await Caller.connect({
  url: MOTET_NATS_URL,
  password: readFileSync(`${MOTET_NATS_CREDENTIALS}/gateway`, "utf8").trim(),
});
try {
  const reply = caller.open("tokenizer", {
    type: "chat",
    model: MOTET_MODEL,
    messages: [{ role: "user", content: question }],
    sampling: { temperature: 0 },
  });
  // Text: ["x", text, ids, …]; see docs/wire.md for the rest of it.
  for await (const [, text] of reply) process.stdout.write(text);
  process.stdout.write("\n");
} catch (error) {
  if (!(error instanceof MotetError)) throw error;
  console.error(`${error.code}: ${error.message}`);
  process.exitCode = 1;
} finally {
  await caller.close();
}
