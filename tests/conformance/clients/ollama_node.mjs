// Ollama's client for JavaScript.

import { Ollama } from "ollama";
import { ANSWER, MODEL, QUESTION, URL_, check, main } from "./cases.mjs";

const client = new Ollama({ host: URL_ });
const messages = [{ role: "user", content: QUESTION }];
const options = { temperature: 0, num_predict: 80 };

await main("ollama", {
  async chat() {
    const made = await client.chat({ model: MODEL, messages, options });
    check(made.message.content.includes(ANSWER), made.message.content);
  },
  async chatStreamed() {
    let text = "";
    for await (const part of await client.chat({ model: MODEL, messages, options, stream: true })) {
      text += part.message.content;
    }
    check(text.includes(ANSWER), text);
  },
  async generate() {
    check((await client.generate({ model: MODEL, prompt: QUESTION, options })).response, "no text");
  },
  async embed() {
    const made = await client.embed({ model: "pocket-embed", input: ["red", "blue"] });
    check(made.embeddings.length === 2, "no vectors");
  },
  async listed() {
    const { models } = await client.list();
    check(models.some((model) => model.model.includes(MODEL)), "the model is not listed");
  },
});
