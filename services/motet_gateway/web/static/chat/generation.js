// Generates the reply to the last message of a conversation: a chat completion, or the picture or video that it asks for.

import { streamChat, streamEdit, streamPicture } from "../common/api.js";
import { blobOf, partsOf } from "../common/data-uri.js";
import { settings } from "../common/settings.js";
import { remove } from "./bubbles.js";
import { soundFormat } from "./files.js";
import { Drawing, STREAM_OPTIONS, TOOL } from "./drawing.js";
import { Filming } from "./filming.js";
import { loadingText } from "../models/loading.js";
import { Meter } from "./meter.js";
import { ReplyView } from "./reply-view.js";

// Adds the reply to the conversation while it streams; nothing if there was none. `status` gets lines of progress. `askAbout`
// returns what a button below a picture does, or null. Returns the error that ended it, or null.
export async function generate(conversation, signal, status, askAbout) {
  const question = conversation.path.at(-1);
  try {
    if (question.filming) await makeVideo(conversation, question, signal, status);
    else if (question.drawing) await drawPicture(conversation, question, signal, status, askAbout);
    else await writeReply(conversation, signal, status);
  } catch (error) {
    if (error.name !== "AbortError") return error;
    if (question.drawing || question.filming) status("stopped");
  }
  return null;
}

async function drawPicture(conversation, { content, images, mask }, signal, status, askAbout) {
  const { imageModel, key, seed } = settings();
  const fields = { model: imageModel, prompt: content, seed };
  const drawing = new Drawing(content);
  const events = images?.length
    ? streamEdit({ ...fields, partial_images: STREAM_OPTIONS.partial_images, progress: true }, blobOf(images[0]), mask ? blobOf(mask) : null, key, signal)
    : streamPicture({ ...fields, ...STREAM_OPTIONS }, key, signal);
  const url = await drawing.run(events, status);
  conversation.push({ role: "assistant", content: "", drawing: true, drawn: [{ image_url: { url }, revised_prompt: content }] });
  const work = askAbout(url);
  if (work) drawing.addButton("Ask about it", work);
}

async function makeVideo(conversation, { content }, signal, status) {
  const { videoModel, key, seed } = settings();
  const fields = { model: videoModel, prompt: content, ...(seed === null ? {} : { seed }) };
  const url = await new Filming(content).run(fields, key, signal, status);
  conversation.push({ role: "assistant", content: "", filming: true, film: { url, prompt: content } });
}

async function writeReply(conversation, signal, status) {
  const body = requestBody(conversation);
  const node = conversation.push({ role: "assistant", content: "" });
  const view = new ReplyView(node);
  const meter = new Meter();
  const follow = {
    begun: (request) => (node.request = request),
    loading: (state) => status(`${body.model}: ${loadingText(state)}`),
  };
  try {
    for await (const chunk of streamChat(body, settings().key, signal, follow)) {
      const delta = chunk.choices[0]?.delta ?? {};
      meter.add(delta.content ?? delta.reasoning_content, chunk.usage);
      meter.note = view.apply(delta);
      meter.hasPictures ||= Boolean(delta.images);
      view.refresh();
      status(meter.toString());
      conversation.touch(); // a reload keeps what has arrived
    }
  } catch (error) {
    if (error.name === "AbortError") meter.note = "stopped";
    throw error;
  } finally {
    view.finish();
    status(meter.toString());
    if (view.drawings.pictures.length) node.drawn = view.drawings.pictures;
    if (!node.content && !node.drawn && !node.calls) {
      conversation.pop();
      remove(view.text);
    }
  }
}

function requestBody(conversation) {
  const { model, system, temperature, topP, seed, maxTokens, imageModel, acceptsImages, acceptsSounds, supportsTools } = settings();
  const messages = conversation.path.filter(({ content, images, files, drawn, drawing, filming }) => !drawing && !filming && (content || images?.length || files?.length || drawn?.length));
  return {
    model,
    messages: [
      ...(system ? [{ role: "system", content: system }] : []),
      ...messages.map((node) => asMessage(node, acceptsImages, acceptsSounds)),
    ],
    temperature,
    seed,
    ...(topP ? { top_p: topP } : {}),
    ...(maxTokens ? { max_completion_tokens: maxTokens } : {}),
    ...(imageModel && supportsTools ? { tools: [{ ...TOOL, model: imageModel }] } : {}),
  };
}

// Converts a message for the API; of pictures and sounds, a model gets those that it accepts.
function asMessage({ role, content, images = [], files = [], drawn = [] }, acceptsImages, acceptsSounds) {
  if (drawn.length) return { role, content, images: drawn };
  const heard = files.filter((file) => acceptsSounds && isUnwritten(file));
  const text = [...files.filter((file) => !heard.includes(file)).map(fileText), content].filter(Boolean).join("\n\n");
  const parts = acceptsImages ? images.map((url) => ({ type: "image_url", image_url: { url } })) : [];
  parts.push(...heard.map(soundPart));
  if (!parts.length) return { role, content: text };
  return { role, content: text ? [...parts, { type: "text", text }] : parts };
}

// Returns whether a file is a sound that was not transcribed.
const isUnwritten = ({ kind, url, text }) => kind === "sound" && url && !text;

function soundPart({ url }) {
  const { type, data } = partsOf(url);
  return { type: "input_audio", input_audio: { data, format: soundFormat(type) } };
}

// Writes a file in front of the message, between fences that its own text does not have.
function fileText({ kind, name, text }) {
  if (kind === "sound") return text ? `Transcript of ${name}: ${text}` : `(${name}: a sound without a transcript)`;
  const longest = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length));
  const fence = "`".repeat(longest + 1);
  return `File ${name}:\n${fence}\n${text}\n${fence}`;
}
