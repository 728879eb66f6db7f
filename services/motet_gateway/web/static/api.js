// The HTTP calls that the page makes. Errors of any kind become ApiError with a message for people.

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

// All models: `id`, `kind`, and `images` and `tools` of those that can be talked to.
export const listModels = (key) => list("v1/models", key);

// Names of the voices of the model that speaks; none without one.
export async function listVoices(key) {
  const voices = await list("v1/audio/voices", key);
  return voices.filter((voice) => voice.model === voices[0].model).map((voice) => voice.id);
}

const metrics = async (path, key) => (await request(`metrics/${path}`, { headers: headers(key) })).json();

// The stack as it is now. `query`: `window`, `first` and `between` in seconds, as the gateway's README says.
export const readStack = (key, query) => metrics(`stack?${new URLSearchParams(query)}`, key);

// The last replies, the newest first.
export const readReplies = async (key) => (await metrics("replies?count=100", key)).replies;

// What limits the stack: the doctor's findings, those that cost most first.
export const readDoctor = async (key) => (await metrics("doctor", key)).findings;

// What the server lacks for spoken conversations: any of "asr", "vad" and "tts".
export async function missingForSpeech() {
  const response = await fetch("health/ready").catch(() => null);
  const body = await response?.json().catch(() => null);
  return body?.speech?.missing ?? ["asr", "vad", "tts"];
}

// Yields the chunks of a chat completion as they arrive; `signal` aborts, which also cancels on the server.
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

// Yields the events of a picture that is drawn: estimates and steps as they come, at last the picture.
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
