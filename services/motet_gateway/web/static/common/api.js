// Makes the page's HTTP calls. Every failure becomes an ApiError with a message for the user.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const authorization = (key) => (key ? { authorization: `Bearer ${key}` } : {});
const headers = (key) => ({ "content-type": "application/json", ...authorization(key) });

const LIST_TIMEOUT = 10_000; // milliseconds

async function request(path, options) {
  let response;
  try {
    response = await fetch(path, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The server cannot be reached.");
  }
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  const told = typeof body?.error === "string" ? body.error : body?.error?.message; // Ollama's routes answer a string
  throw new ApiError(told ?? `The server answered ${response.status}.`, response.status);
}

// A request that gets no answer, say while the gateway is replaced, is given up, so that its caller can try again.
async function list(path, key) {
  const response = await request(path, { headers: headers(key), signal: AbortSignal.timeout(LIST_TIMEOUT) });
  return (await response.json()).data;
}

// Returns all models: `id`, `kind`, and of chat models `images`, `audio` and `tools`.
export const listModels = (key) => list("v1/models", key);

// Yields the progress of the download of a model from the hub: {status, completed, total}; aborting `signal` ends it.
export async function* pullModel(model, key, signal) {
  const response = await request("api/pull", { method: "POST", headers: headers(key), body: JSON.stringify({ model }), signal });
  let last = {};
  for await (const line of pieces(response.body, "\n")) {
    if (!line) continue;
    last = JSON.parse(line);
    if (last.error) throw new ApiError(last.error);
    yield last;
  }
  if (last.status !== "success") throw new ApiError(`The download of ${model} broke off; download it again to go on from here.`);
}

// Returns the voices of the speech synthesis model; none without one.
export async function listVoices(key) {
  const voices = await list("v1/audio/voices", key);
  return voices.filter((voice) => voice.model && voice.model === voices[0].model).map((voice) => voice.id);
}

const metrics = async (path, key) => (await request(`metrics/${path}`, { headers: headers(key) })).json();

// Returns the state of the stack. `query`: `window`, `first` and `between` in seconds; see the gateway's README.
export const readStack = (key, query) => metrics(`stack?${new URLSearchParams(query)}`, key);

// Returns the latest replies, newest first; only those of one request if its id is given.
export const readReplies = async (key, request = "") => (await metrics(`replies?${new URLSearchParams({ count: 100, request })}`, key)).replies;

// Returns the doctor's findings, the most costly first.
export const readDoctor = async (key) => (await metrics("doctor", key)).findings;

// Returns what a spoken conversation with a model lacks and whether that gets the user's sound: {missing: ["asr", "vad", "tts"], hears}.
export async function readSpeech(model) {
  const response = await fetch(`health/ready?${new URLSearchParams({ speech_model: model })}`).catch(() => null);
  const body = await response?.json().catch(() => null);
  return body?.speech ?? { missing: ["asr", "vad", "tts"], hears: false };
}

// Yields the chunks of a chat completion; aborting `signal` also cancels it on the server. `begun` gets the id of the request, and
// `loading` where its model stands while it is loaded.
export async function* streamChat(body, key, signal, { begun, loading }) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, ...options }),
    signal,
  });
  begun(response.headers.get("x-request-id"));
  for await (const data of events(response.body, loading)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("The connection broke before the reply was complete.");
}

// Yields the events of an image generation: estimates and steps, then the picture.
export async function* streamPicture(body, key, signal) {
  const content = JSON.stringify({ ...body, stream: true });
  yield* pictureEvents("v1/images/generations", { method: "POST", headers: headers(key), body: content, signal });
}

// Yields the events of an edit of the picture `image`, where `mask` is transparent; a null mask is all of it. Both are Blobs.
export async function* streamEdit(fields, image, mask, key, signal) {
  const files = mask ? { image, mask } : { image };
  const body = form({ ...fields, stream: true }, files);
  yield* pictureEvents("v1/images/edits", { method: "POST", headers: authorization(key), body, signal });
}

// Queues a video and returns it: `id`, `status`, `progress` in percent, `error`; `readVideo` returns where it stands.
export const createVideo = async (body, key, signal) =>
  (await request("v1/videos", { method: "POST", headers: headers(key), body: JSON.stringify(body), signal })).json();

export const readVideo = async (id, key, signal) => (await request(`v1/videos/${id}`, { headers: headers(key), signal })).json();

// Returns a completed video as a Blob.
export const readVideoContent = async (id, key, signal) => (await request(`v1/videos/${id}/content`, { headers: headers(key), signal })).blob();

export const deleteVideo = (id, key) => request(`v1/videos/${id}`, { method: "DELETE", headers: headers(key) });

// Returns the transcript of a sound file.
export async function transcribe(file, model, key) {
  const options = { method: "POST", headers: authorization(key), body: form({ model }, { file }) };
  return (await (await request("v1/audio/transcriptions", options)).json()).text.trim();
}

// Yields the samples (Int16Array, 24 kHz) of a speech synthesis.
export async function* streamSpeech(body, key, signal) {
  const options = { method: "POST", headers: headers(key), body: JSON.stringify(body), signal };
  const reader = (await request("v1/audio/speech", options)).body.getReader();
  let odd = new Uint8Array(); // the first half of a sample
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const bytes = new Uint8Array([...odd, ...value]);
    odd = bytes.slice(bytes.length - (bytes.length % 2));
    yield new Int16Array(bytes.buffer.slice(0, bytes.length - odd.length));
  }
}

function form(fields, files) {
  const made = new FormData();
  for (const [name, value] of Object.entries(fields)) if (value !== null) made.append(name, String(value));
  for (const [name, file] of Object.entries(files)) made.append(name, file, file.name ?? name);
  return made;
}

async function* pictureEvents(path, options) {
  const response = await request(path, options);
  for await (const data of events(response.body)) {
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
    if (event.type.endsWith(".completed")) return;
  }
  throw new ApiError("The connection broke before the picture was complete.");
}

const LOADING = ": loading "; // begins a comment of a stream

async function* events(stream, loading = () => {}) {
  for await (const part of pieces(stream, "\n\n")) {
    for (const line of part.split("\n")) {
      if (line.startsWith("data: ")) yield line.slice(6);
      else if (line.startsWith(LOADING)) loading(JSON.parse(line.slice(LOADING.length)));
    }
  }
}

// Yields what a stream has between separators, as it arrives.
async function* pieces(stream, separator) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (buffer + value).split(separator);
      buffer = parts.pop();
      yield* parts;
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the reply was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
