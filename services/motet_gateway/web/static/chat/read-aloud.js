// Reads a message aloud with the server's speech synthesis, from its first sound on.

import { streamSpeech } from "../common/api.js";
import { Player } from "../voice/player.js";

const MOST = 20_000; // characters

let current = null; // {button, abort, player}

// Begins, or ends what is being read. `settings`: of settings.js. Throws ApiError.
export async function readAloud(text, button, { speechModel, voice, key }) {
  const same = current?.button === button;
  stopReading();
  if (same) return;
  const reading = (current = { button, abort: new AbortController(), player: null });
  button.setAttribute("aria-pressed", "true");
  try {
    reading.player = await Player.open(({ kind }) => kind === "ended" && finish(reading));
    if (reading.abort.signal.aborted) return reading.player.close();
    const body = { model: speechModel, input: text.slice(0, MOST), ...(voice ? { voice } : {}), response_format: "pcm" };
    for await (const samples of streamSpeech(body, key, reading.abort.signal)) reading.player.push("read", samples);
    reading.player.end("read");
  } catch (error) {
    finish(reading);
    if (error.name !== "AbortError") throw error;
  }
}

export function stopReading() {
  if (current) finish(current);
}

function finish(reading) {
  reading.abort.abort();
  reading.player?.close();
  reading.player = null;
  reading.button.removeAttribute("aria-pressed");
  if (current === reading) current = null;
}
