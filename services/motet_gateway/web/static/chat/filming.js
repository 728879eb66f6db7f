// Shows the making of a video: its progress, then the video with controls.

import { element } from "../common/elements.js";
import { ApiError, createVideo, deleteVideo, readVideo, readVideoContent } from "../common/api.js";
import { blobOf, dataUri } from "../common/data-uri.js";
import { bubble, remove, show } from "./bubbles.js";

const POLL = 500; // ms
const PATIENCE = 60_000; // ms in which the server may be restarted

export class Filming {
  #text = bubble("assistant");
  #bar = element("progress", { max: "100", value: "0" });
  #began = performance.now();
  #prompt;

  constructor(prompt) {
    this.#prompt = prompt;
    this.#text.textContent = "Filming…";
  }

  // Has the video made, and returns it as a data URI. The server deletes its copy. `onProgress` gets progress lines. Throws ApiError.
  async run(fields, key, signal, onProgress) {
    this.#bar.setAttribute("aria-label", `${this.#prompt} (in progress)`);
    show(() => this.#text.append(this.#bar));
    let id = null;
    try {
      let video = await createVideo(fields, key); // not aborted: its id would be lost
      id = video.id;
      signal.throwIfAborted();
      while (video.status !== "completed") {
        if (video.status === "failed") throw new Error(video.error?.message ?? "The video could not be made.");
        await pause(POLL, signal);
        video = await patiently(() => readVideo(id, key, signal), signal);
        this.#bar.value = video.progress;
        onProgress(video.status === "queued" ? "the video waits" : `${video.progress} % of the video`);
      }
      const url = await dataUri(await patiently(() => readVideoContent(id, key, signal), signal));
      onProgress(`video in ${((performance.now() - this.#began) / 1000).toFixed(1)} s`);
      this.restore(url).play().catch(() => {}); // where the browser forbids it, the user does
      return url;
    } catch (error) {
      remove(this.#text);
      throw error;
    } finally {
      if (id) deleteVideo(id, key).catch(() => {}); // it is kept here, and there for a time at most
    }
  }

  // Shows the finished video, which plays again and again, and returns its element.
  restore(url) {
    const video = element("video", { controls: "", loop: "", playsinline: "", src: URL.createObjectURL(blobOf(url)), "aria-label": this.#prompt });
    show(() => this.#text.replaceWith(video));
    return video;
  }
}

// Returns what the server answers; asks again while it cannot be reached or is starting, for PATIENCE.
async function patiently(ask, signal) {
  const giveUp = performance.now() + PATIENCE;
  for (;;) {
    try {
      return await ask();
    } catch (error) {
      const passes = error instanceof ApiError && (error.status === 0 || error.status >= 500);
      if (!passes || performance.now() > giveUp) throw error;
    }
    await pause(POLL, signal);
  }
}

// Waits; rejects as `fetch` does when `signal` is aborted.
function pause(time, signal) {
  return new Promise((resolve, reject) => {
    const stop = () => reject(signal.reason);
    if (signal.aborted) return stop();
    signal.addEventListener("abort", stop, { once: true });
    setTimeout(() => {
      signal.removeEventListener("abort", stop);
      resolve();
    }, time);
  });
}
