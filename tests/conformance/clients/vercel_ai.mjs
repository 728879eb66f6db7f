// Vercel's AI SDK, with OpenAI's provider over Responses and chats.

import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { Output, embedMany, generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";
import { ANSWER, KEY, MODEL, QUESTION, V1, WISH, check, main } from "./cases.mjs";

const provider = createOpenAI({ baseURL: V1, apiKey: KEY });
const compatible = createOpenAICompatible({
  name: "motet", baseURL: V1, apiKey: KEY, supportsStructuredOutputs: true,
});
const models = {
  responses: provider.responses(MODEL),
  chat: provider.chat(MODEL),
  compatible: compatible(MODEL),
};
const options = { temperature: 0, maxRetries: 0, maxOutputTokens: 80 };

function draw(drawn) {
  return tool({
    description: "Draw a picture.",
    inputSchema: z.object({ prompt: z.string() }),
    execute: async ({ prompt }) => (drawn.push(prompt), "done"),
  });
}

const cases = {
  async embeddings() {
    const model = provider.textEmbeddingModel?.("pocket-embed") ?? provider.embedding("pocket-embed");
    const made = await embedMany({ model, values: ["red", "blue"], maxRetries: 0 });
    check(made.embeddings.length === 2, "no vectors");
  },
};
for (const [name, model] of Object.entries(models)) {
  cases[`${name}`] = async () => {
    const made = await generateText({ model, prompt: QUESTION, ...options });
    check(made.text.includes(ANSWER), made.text);
  };
  cases[`${name}Streamed`] = async () => {
    let text = "";
    const made = streamText({ model, prompt: QUESTION, ...options });
    for await (const part of made.textStream) text += part;
    check(text.includes(ANSWER), text);
  };
  cases[`${name}Tool`] = async () => {
    const drawn = [];
    const tools = { draw: draw(drawn) };
    await generateText({ model, prompt: WISH, tools, stopWhen: stepCountIs(2), ...options });
    check(drawn.length > 0, "the tool was not called");
  };
  cases[`${name}Structured`] = async () => {
    const schema = z.object({ color: z.enum(["red", "blue"]) });
    const output = Output.object({ schema });
    const made = await generateText({ model, prompt: QUESTION, output, ...options });
    check(["red", "blue"].includes(made.output.color), JSON.stringify(made.output));
  };
}
await main("ai", cases);
