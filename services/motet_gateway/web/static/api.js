// Makes the page's HTTP calls. Every failure becomes an ApiError with a message for the user.

export class ApiError extends Error {
  constructor(message, status = 0) {
    super(message);
    this.status = status;
  }
}

const headers = (key) => ({
  "content-type": "application/json",
  ...(key ? { authorization: `Bearer ${key}` } : {}),
});

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
  throw new ApiError(body?.error?.message ?? `The server answered ${response.status}.`, response.status);
}

const list = async (path, key) => (await (await request(path, { headers: headers(key) })).json()).data;

// Returns all models: `id`, `kind`, and of chat models `images` and `tools`.
export const listModels = (key) => list("v1/models", key);

// Returns the voices of the speech synthesis model; none without one.
export async function listVoices(key) {
  const voices = await list("v1/audio/voices", key);
  return voices.filter((voice) => voice.model === voices[0].model).map((voice) => voice.id);
}

const metrics = async (path, key) => (await request(`metrics/${path}`, { headers: headers(key) })).json();

// Returns the state of the stack. `query`: `window`, `first` and `between` in seconds; see the gateway's README.
export const readStack = (key, query) => metrics(`stack?${new URLSearchParams(query)}`, key);

// Returns the latest replies, newest first.
export const readReplies = async (key) => (await metrics("replies?count=100", key)).replies;

// Returns the doctor's findings, the most costly first.
export const readDoctor = async (key) => (await metrics("doctor", key)).findings;

// Returns the roles that the server lacks for spoken conversations: "asr", "vad", "tts".
export async function missingForSpeech() {
  const response = await fetch("health/ready").catch(() => null);
  const body = await response?.json().catch(() => null);
  return body?.speech?.missing ?? ["asr", "vad", "tts"];
}

// Yields the chunks of a chat completion; aborting `signal` also cancels it on the server.
export async function* streamChat(body, key, signal) {
  const options = { stream: true, stream_options: { include_usage: true } };
  const response = await request("v1/chat/completions", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, ...options }),
    signal,
  });
  for await (const data of events(response.body)) {
    if (data === "[DONE]") return;
    const chunk = JSON.parse(data);
    if (chunk.error) throw new ApiError(chunk.error.message);
    yield chunk;
  }
  throw new ApiError("The connection broke before the reply was complete.");
}

// Yields the events of an image generation: estimates and steps, then the picture.
export async function* streamPicture(body, key, signal) {
  const response = await request("v1/images/generations", {
    method: "POST",
    headers: headers(key),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  });
  for await (const data of events(response.body)) {
    const event = JSON.parse(data);
    if (event.error) throw new ApiError(event.error.message);
    yield event;
    if (event.type.endsWith(".completed")) return;
  }
  throw new ApiError("The connection broke before the picture was complete.");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let buffer = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const parts = (buffer + value).split("\n\n");
      buffer = parts.pop();
      for (const line of parts.flatMap((part) => part.split("\n"))) if (line.startsWith("data: ")) yield line.slice(6);
    }
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ApiError("The connection broke before the reply was complete.");
  } finally {
    reader.cancel().catch(() => {});
  }
}
