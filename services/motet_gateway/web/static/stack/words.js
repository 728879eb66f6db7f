// Says in plain words what services, stages of a reply and layers of the stack do; the terms stay beside them.

const ROLES = {
  clients: "send requests",
  gateway: "answers clients",
  tokenizer: "turns text into tokens",
  prefill: "reads long prompts",
  decode: "writes replies",
  encoder: "sees pictures, hears sound",
  vad: "notices who speaks",
  asr: "writes down speech",
  speakers: "tells voices apart",
  tts: "reads text aloud",
  diffusion: "draws pictures",
  embedding: "compares texts",
  ranking: "orders documents",
  planner: "adds and removes instances",
  operator: "loads models on demand",
};

const STAGES = {
  gateway: "from the request to the end of the reply",
  tokenizer: "text to tokens, and back",
  "tokenizer.encode": "turns the prompt into tokens",
  "tokenizer.media": "waits for pictures and sound to be read",
  "tokenizer.wait": "waits for an instance that is free",
  decode: "computes the reply",
  "decode.grammar": "prepares the required format",
  "decode.queue": "waits for its turn",
  "decode.transfer": "receives a prompt that another instance has read",
  "decode.prefill": "reads the prompt",
  "decode.decode": "writes the reply, token by token",
  "first token": "the reply begins",
};

const LAYERS = {
  machine: "the machine",
  model: "the model's computation",
  cache: "the memory of conversations",
  scheduler: "the order of work",
  fleet: "the number of instances",
  text: "text and connections",
  client: "the client",
};

const STATUSES = {
  stop: "finished",
  length: "cut at its limit",
  tool_calls: "called tools",
  left: "client left",
};

const SEVERITIES = { warning: "Delays some requests.", critical: "Delays most requests." };

export const roleWords = (role) => ROLES[role] ?? "";
export const stageWords = (name) => STAGES[name] ?? "";
export const layerWords = (layer) => LAYERS[layer] ?? layer;
export const statusWords = (status) => STATUSES[status] ?? status;
export const severityWords = (severity) => SEVERITIES[severity] ?? severity;
