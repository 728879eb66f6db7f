// Anthropic's client for JavaScript.

import Anthropic from "@anthropic-ai/sdk";
import { ANSWER, KEY, MODEL, QUESTION, TOOL_SCHEMA, URL_, WISH, check, main } from "./cases.mjs";

const client = new Anthropic({ baseURL: URL_, apiKey: KEY, maxRetries: 0 });
const ask = [{ role: "user", content: QUESTION }];
const options = { model: MODEL, max_tokens: 80, temperature: 0 };
const tool = { name: "draw", description: "Draw a picture.", input_schema: TOOL_SCHEMA };

await main("@anthropic-ai/sdk", {
  async message() {
    const made = await client.messages.create({ ...options, messages: ask });
    check(made.content[0].text.includes(ANSWER), made.content[0].text);
  },
  async messageStreamed() {
    const stream = client.messages.stream({ ...options, messages: ask });
    let text = "";
    stream.on("text", (part) => { text += part; });
    const made = await stream.finalMessage();
    check(text.includes(ANSWER) && made.stop_reason === "end_turn", text);
  },
  async toolUse() {
    const wish = [{ role: "user", content: WISH }];
    const made = await client.messages.create({ ...options, messages: wish, tools: [tool] });
    const call = made.content.find((block) => block.type === "tool_use");
    check(call?.input.prompt.includes("circle"), "the tool was not called");
  },
  async countTokens() {
    const made = await client.messages.countTokens({ model: MODEL, messages: ask });
    check(made.input_tokens > 5, "too few tokens");
  },
  async cancel() {
    const stream = client.messages.stream({ ...options, messages: ask });
    for await (const _ of stream) break;
    stream.abort();
  },
  async errors() {
    const asked = { ...options, model: "no-such-model", messages: ask };
    const error = await client.messages.create(asked).catch((caught) => caught);
    check(error instanceof Anthropic.NotFoundError, `${error}`);
  },
});
