// Reads files for a message: pictures as data URIs, sounds with the transcript of the server, and text.

import { transcribe } from "../common/api.js";
import { dataUri } from "../common/data-uri.js";

const MAX_SIDE = 1536; // px; larger pictures are downscaled, since models use no more
const MAX_TEXT = 256 * 1024; // bytes
const MAX_SOUND = 24 * 1024 * 1024; // bytes

// Returns {kind: "picture" | "sound" | "text", name, url, text}. `abilities`: {images, sounds, asrModel, key}. A sound that nothing
// transcribes has no text: the model hears it. Throws Error with a message for the user.
export async function readFile(file, { images, sounds, asrModel, key }) {
  if (file.type.startsWith("image/")) {
    if (!images) throw new Error("This model does not accept pictures: choose another one.");
    return { kind: "picture", name: file.name, url: await downscaled(file).catch(() => unreadable(file)) };
  }
  if (file.type.startsWith("audio/")) return readSound(file, sounds, asrModel, key);
  return { kind: "text", name: file.name, text: await readText(file) };
}

function unreadable({ name }) {
  throw new Error(`${name} is not a picture that this browser can read.`);
}

async function readSound(file, heard, model, key) {
  if (!model && !heard) throw new Error("Sounds need a model that hears or speech recognition (--asr), which this server does not run.");
  if (file.size > MAX_SOUND) throw new Error(`${file.name} is larger than 24 MiB.`);
  if (!model && !soundFormat(file.type)) throw new Error(`${file.name}: models hear WAV and MP3 only.`);
  const [url, text] = await Promise.all([dataUri(file), model ? transcribe(file, model, key) : ""]);
  return { kind: "sound", name: file.name, url, text };
}

// Returns the format of a sound as chat requests name it, or "" for one that they cannot have.
export function soundFormat(type) {
  if (/^audio\/(x-|vnd\.)?wave?$/.test(type)) return "wav";
  return /^audio\/(mpeg|mp3)$/.test(type) ? "mp3" : "";
}

async function readText(file) {
  if (file.size > MAX_TEXT) throw new Error(`${file.name} is larger than 256 KiB.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    if (!text.includes("\0")) return text;
  } catch {
    // not UTF-8
  }
  throw new Error(`${file.name} is neither a picture, a sound nor text.`);
}

// Returns the file as a data URI, downscaled if it is large.
async function downscaled(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size < 1 << 20) return await dataUri(file);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(bitmap.width * scale), Math.round(bitmap.height * scale)];
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}
