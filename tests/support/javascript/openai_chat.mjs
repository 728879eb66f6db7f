// Ask for a chat with OpenAI's client and print the text of its reply and its tokens: `node openai_chat.mjs URL KEY MODEL`.
import OpenAI from "openai";

const [baseURL, apiKey, model] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey, maxRetries: 3 });
const reply = await client.chat.completions.create(
  { model, messages: [{ role: "user", content: "Tell me." }] },
  { headers: { "Idempotency-Key": "node" } },
);
console.log(JSON.stringify({ text: reply.choices[0].message.content, tokens: reply.usage.total_tokens }));
