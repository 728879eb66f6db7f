// OpenAI's client for JavaScript.

import OpenAI, { toFile } from "openai";
import { ANSWER, KEY, MODEL, QUESTION, TOOL_SCHEMA, V1, WISH, check, main } from "./cases.mjs";

const client = new OpenAI({ baseURL: V1, apiKey: KEY, maxRetries: 0 });
const ask = [{ role: "user", content: QUESTION }];
const tool = {
  type: "function",
  function: { name: "draw", description: "Draw a picture.", parameters: TOOL_SCHEMA },
};
const chats = client.chat.completions;

await main("openai", {
  async models() {
    const names = [];
    for await (const model of client.models.list()) names.push(model.id);
    check(names.includes(MODEL), "the model is not listed");
  },
  async chat() {
    const made = await chats.create({ model: MODEL, messages: ask, temperature: 0 });
    check(made.choices[0].message.content.includes(ANSWER), made.choices[0].message.content);
  },
  async chatStreamed() {
    const stream = await chats.create({
      model: MODEL, messages: ask, temperature: 0, stream: true,
      stream_options: { include_usage: true },
    });
    let text = "";
    let usage = null;
    for await (const chunk of stream) {
      text += chunk.choices[0]?.delta?.content ?? "";
      usage = chunk.usage ?? usage;
    }
    check(text.includes(ANSWER), text);
    check(usage?.total_tokens > 0, "there is no usage");
  },
  async toolCall() {
    const made = await chats.create({
      model: MODEL, messages: [{ role: "user", content: WISH }], tools: [tool],
      temperature: 0, max_tokens: 80,
    });
    const [call] = made.choices[0].message.tool_calls;
    check(JSON.parse(call.function.arguments).prompt.includes("circle"), "wrong arguments");
  },
  async toolsRun() {
    const drawn = [];
    const run = chats.runTools({
      model: MODEL, messages: [{ role: "user", content: WISH }], temperature: 0, max_tokens: 80,
      tools: [{
        type: "function",
        function: {
          ...tool.function, parse: JSON.parse,
          function: (given) => (drawn.push(given.prompt), "done"),
        },
      }],
    }, { maxChatCompletions: 3 });
    await run.done();
    check(drawn.length > 0, "the tool was not called");
  },
  async cancel() {
    const stream = await chats.create({ model: MODEL, messages: ask, stream: true });
    for await (const _ of stream) break;
    stream.controller.abort();
  },
  async errors() {
    const error = await chats
      .create({ model: MODEL, messages: ask, temperature: 9 })
      .catch((caught) => caught);
    check(error instanceof OpenAI.BadRequestError && error.param === "temperature", `${error}`);
  },
  async responses() {
    const made = await client.responses.create({ model: MODEL, input: QUESTION, temperature: 0 });
    check(made.output_text.includes(ANSWER), made.output_text);
  },
  async responsesStreamed() {
    const stream = client.responses.stream({ model: MODEL, input: QUESTION, temperature: 0 });
    const kinds = new Set();
    for await (const event of stream) kinds.add(event.type);
    check(kinds.has("response.output_text.delta"), [...kinds].join());
    check((await stream.finalResponse()).output_text.includes(ANSWER), "wrong text");
  },
  async embeddings() {
    const made = await client.embeddings.create({ model: "pocket-embed", input: ["red", "blue"] });
    check(made.data.length === 2 && made.data[0].embedding.length > 1, "no vectors");
  },
  async files() {
    const file = await client.files.create({
      file: await toFile(Buffer.from("{}"), "a.jsonl"), purpose: "batch",
    });
    check((await (await client.files.content(file.id)).text()) === "{}", "other content");
    check((await client.files.delete(file.id)).deleted, "not deleted");
  },
});
