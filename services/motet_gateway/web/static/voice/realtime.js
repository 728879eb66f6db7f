// Sends and receives the events of a spoken conversation over a WebSocket, without interpreting them.
//
// After a disconnection the session resumes over a new socket: missed events arrive, and unreceived ones are sent again.

import { ApiError } from "../common/api.js";

const MAX_BUFFERED = 2 ** 21; // bytes; about half a minute of audio
const SESSION_TTL = 30_000; // ms that the server keeps a session after a disconnection
const RETRY_DELAYS = [0, 250, 500, 1000, 2000]; // ms before each attempt; the last one repeats
const INTENTIONAL = [1000, 1005, 1012, 3000, 4000, 4001]; // close codes after which nothing is resumed
const CLOSE_MESSAGES = {
  1006: "The connection broke.",
  1012: "The server restarts. Press Talk again in a moment.",
  1013: "The server is busy. Try again in a moment.",
  4001: "The conversation continues in another window.",
};

export class Realtime {
  #model;
  #key;
  #socket;
  #onEvent;
  #onClose;
  #session = ""; // its id
  #lastId = ""; // id of the last received event
  #count = 0; // number of sent events
  #sent = []; // the latest of them
  #size = 0; // bytes of those
  #disconnectedAt = null; // ms; null while connected
  #tries = 0;
  #refused = "";

  // Resolves after `session.created`; rejects with ApiError. `onEvent` gets every event, `onClose` the reason of the end.
  static connect(model, key, { onEvent, onClose }) {
    return new Promise((resolve, reject) => {
      const socket = new Realtime(model, key, (event) => {
        if (event.type === "session.created") {
          [socket.#onEvent, socket.#onClose] = [onEvent, onClose];
          resolve(socket);
          onEvent(event);
        } else if (event.type === "error") {
          reject(new ApiError(event.error.message));
        }
      }, (reason) => reject(new ApiError(reason)));
    });
  }

  constructor(model, key, onEvent, onClose) {
    [this.#model, this.#key, this.#onEvent, this.#onClose] = [model, key, onEvent, onClose];
    this.#open({});
  }

  #open(query) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.search = new URLSearchParams({ model: this.#model, ...query });
    // A page cannot set headers on a WebSocket.
    this.#socket = new WebSocket(url, ["realtime", ...(this.#key ? [`openai-insecure-api-key.${this.#key}`] : [])]);
    this.#socket.onmessage = ({ data }) => this.#receive(JSON.parse(data));
    this.#socket.onclose = ({ code, reason }) => this.#disconnected(code, reason);
  }

  #receive(event) {
    if (event.type === "session.created") this.#session = event.session.id;
    else if (this.#lastId && origin(event.event_id) !== origin(this.#lastId)) {
      this.#refused = event.error.message; // from another origin: the session was refused
      return;
    }
    this.#lastId = event.event_id;
    if (event.type === "session.resumed") this.#resume(event.received.events);
    else this.#onEvent(event);
  }

  #resume(received) {
    [this.#disconnectedAt, this.#tries] = [null, 0];
    for (const text of this.#sent.slice(Math.max(0, received - (this.#count - this.#sent.length)))) {
      this.#socket.send(text);
    }
  }

  #disconnected(code, reason) {
    if (this.#session && !this.#refused && !INTENTIONAL.includes(code)) {
      this.#disconnectedAt ??= performance.now();
      if (performance.now() - this.#disconnectedAt < SESSION_TTL) return this.#reconnect();
    }
    const why = this.#refused || reason;
    this.#onClose(CLOSE_MESSAGES[code] ?? (why ? `The server closed the connection: ${why}` : "The connection was closed."));
  }

  #reconnect() {
    const pause = RETRY_DELAYS[Math.min(this.#tries++, RETRY_DELAYS.length - 1)];
    setTimeout(() => this.#session && this.#open({ session_id: this.#session, after: this.#lastId }), pause);
  }

  send(type, fields = {}) {
    const text = JSON.stringify({ type, ...fields });
    this.#count += 1;
    this.#size += text.length;
    this.#sent.push(text);
    while (this.#size > MAX_BUFFERED) this.#size -= this.#sent.shift().length;
    if (this.#disconnectedAt !== null || this.#socket.readyState !== WebSocket.OPEN) return;
    this.#socket.send(text);
    if (this.#socket.bufferedAmount > MAX_BUFFERED) {
      this.#onClose("The connection is too slow for audio.");
      this.close();
    }
  }

  close() {
    this.#onEvent = this.#onClose = () => {};
    this.#session = "";
    this.#socket.close(1000);
  }
}

// Returns the session, or the refusal, that an event belongs to.
function origin(eventId) {
  return eventId.slice(0, eventId.lastIndexOf("_"));
}

const CHUNK = 2 ** 15; // bytes; a call takes no more arguments than its stack holds

export function toBase64(pcm) {
  const bytes = new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength);
  let text = "";
  for (let at = 0; at < bytes.length; at += CHUNK) text += String.fromCharCode(...bytes.subarray(at, at + CHUNK));
  return btoa(text);
}

// Decodes 16-bit samples into a buffer of their own.
export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}
