// The socket of a spoken conversation: events out, events in. What they mean is not known here.

import { ApiError } from "./api.js";

const MOST_WAITING = 2 ** 21; // bytes; about half a minute of sound that does not get out
const CLOSED = {
  1006: "The connection broke.",
  1012: "The server restarts. Press Talk to go on in a moment.",
  1013: "The server is busy. Try again in a moment.",
};

export class Realtime {
  #socket;
  #hear;
  #closed;

  // Resolves after `session.created`; ApiError says why not. `hear` gets every event, `closed` why it ended.
  static connect(model, key, { hear, closed }) {
    return new Promise((resolve, reject) => {
      const socket = new Realtime(model, key, (event) => {
        if (event.type === "session.created") {
          [socket.#hear, socket.#closed] = [hear, closed];
          resolve(socket);
          hear(event);
        } else if (event.type === "error") {
          reject(new ApiError(event.error.message));
        }
      }, (reason) => reject(new ApiError(reason)));
    });
  }

  constructor(model, key, hear, closed) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.searchParams.set("model", model);
    // A page cannot set headers on a WebSocket.
    this.#socket = new WebSocket(url, ["realtime", ...(key ? [`openai-insecure-api-key.${key}`] : [])]);
    [this.#hear, this.#closed] = [hear, closed];
    this.#socket.onmessage = ({ data }) => this.#hear(JSON.parse(data));
    this.#socket.onclose = ({ code, reason }) =>
      this.#closed(CLOSED[code] ?? (reason ? `The server closed the connection: ${reason}` : "The connection was closed."));
  }

  send(type, fields = {}) {
    if (this.#socket.readyState !== WebSocket.OPEN) return;
    this.#socket.send(JSON.stringify({ type, ...fields }));
    if (this.#socket.bufferedAmount > MOST_WAITING) {
      this.#closed("The connection is too slow for sound.");
      this.close();
    }
  }

  close() {
    this.#hear = this.#closed = () => {};
    this.#socket.close();
  }
}

export function toBase64(pcm) {
  return btoa(String.fromCharCode(...new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength)));
}

// Samples of 16 bits, as a view on memory of their own.
export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}
