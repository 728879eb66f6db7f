// The socket of a spoken conversation: events out, events in. What they mean is not known here.
//
// If it breaks, the session goes on over another one: what was missed comes again, what did not get out is sent again.

import { ApiError } from "./api.js";

const MOST_WAITING = 2 ** 21; // bytes; about half a minute of sound that does not get out
const KEPT = 30_000; // ms for which the server keeps a session
const PAUSES = [0, 250, 500, 1000, 2000]; // ms before each try; then as the last
const MEANT = [1000, 1005, 1012, 3000, 4000, 4001]; // codes of sockets that were closed on purpose
const CLOSED = {
  1006: "The connection broke.",
  1012: "The server restarts. Press Talk to go on in a moment.",
  1013: "The server is busy. Try again in a moment.",
  4001: "The conversation goes on in another window.",
};

export class Realtime {
  #model;
  #key;
  #socket;
  #hear;
  #closed;
  #session = ""; // its id
  #last = ""; // the id of the last event that came
  #count = 0; // events that were sent
  #sent = []; // the last of them
  #size = 0; // bytes of those
  #brokenAt = null; // ms; null: it is not
  #tries = 0;
  #refused = "";

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
    [this.#model, this.#key, this.#hear, this.#closed] = [model, key, hear, closed];
    this.#open({});
  }

  #open(query) {
    const url = new URL("v1/realtime", location.href);
    url.protocol = url.protocol.replace("http", "ws");
    url.search = new URLSearchParams({ model: this.#model, ...query });
    // A page cannot set headers on a WebSocket.
    this.#socket = new WebSocket(url, ["realtime", ...(this.#key ? [`openai-insecure-api-key.${this.#key}`] : [])]);
    this.#socket.onmessage = ({ data }) => this.#take(JSON.parse(data));
    this.#socket.onclose = ({ code, reason }) => this.#end(code, reason);
  }

  #take(event) {
    if (event.type === "session.created") this.#session = event.session.id;
    else if (this.#last && origin(event.event_id) !== origin(this.#last)) {
      this.#refused = event.error.message; // it is not the session that speaks
      return;
    }
    this.#last = event.event_id;
    if (event.type === "session.resumed") this.#resume(event.received.events);
    else this.#hear(event);
  }

  #resume(received) {
    [this.#brokenAt, this.#tries] = [null, 0];
    for (const text of this.#sent.slice(Math.max(0, received - (this.#count - this.#sent.length)))) {
      this.#socket.send(text);
    }
  }

  #end(code, reason) {
    if (this.#session && !this.#refused && !MEANT.includes(code)) {
      this.#brokenAt ??= performance.now();
      if (performance.now() - this.#brokenAt < KEPT) return this.#again();
    }
    const why = this.#refused || reason;
    this.#closed(CLOSED[code] ?? (why ? `The server closed the connection: ${why}` : "The connection was closed."));
  }

  #again() {
    const pause = PAUSES[Math.min(this.#tries++, PAUSES.length - 1)];
    setTimeout(() => this.#session && this.#open({ session_id: this.#session, after: this.#last }), pause);
  }

  send(type, fields = {}) {
    const text = JSON.stringify({ type, ...fields });
    this.#count += 1;
    this.#size += text.length;
    this.#sent.push(text);
    while (this.#size > MOST_WAITING) this.#size -= this.#sent.shift().length;
    if (this.#brokenAt !== null || this.#socket.readyState !== WebSocket.OPEN) return;
    this.#socket.send(text);
    if (this.#socket.bufferedAmount > MOST_WAITING) {
      this.#closed("The connection is too slow for sound.");
      this.close();
    }
  }

  close() {
    this.#hear = this.#closed = () => {};
    this.#session = "";
    this.#socket.close(1000);
  }
}

// Which session, or which refusal, an event is of.
function origin(eventId) {
  return eventId.slice(0, eventId.lastIndexOf("_"));
}

export function toBase64(pcm) {
  return btoa(String.fromCharCode(...new Uint8Array(pcm.buffer, pcm.byteOffset, pcm.byteLength)));
}

// Samples of 16 bits, as a view on memory of their own.
export function fromBase64(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  return new Int16Array(bytes.buffer, 0, bytes.length >> 1);
}
