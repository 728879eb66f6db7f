// Says where a model stands that is loaded when a message needs it.

const LEAST = 1; // seconds; a shorter time is not told

const about = (seconds) => (seconds >= LEAST ? `about ${Math.round(seconds)} s` : "");
const joined = (...parts) => parts.filter(Boolean).join(", ");

// `state`: `loading` of `/v1/models`: {stage, share, seconds, problem}.
export function loadingText({ stage, share, seconds, problem }) {
  if (stage === "loading" || stage === "ready") return joined(`loading ${Math.round(100 * share)} %`, about(seconds));
  if (stage === "queued" || stage === "clearing") return "waits for the memory of another model";
  if (stage === "failed") return `cannot be loaded: ${problem}`;
  return joined("loaded at its first message", about(seconds));
}
