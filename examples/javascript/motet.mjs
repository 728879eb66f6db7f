// Streaming calls of a stack's services from JavaScript, by docs/wire.md: NATS and MessagePack.
//
//     const caller = await Caller.connect({ url, password });
//     for await (const body of caller.open("tokenizer", { type: "chat", … })) …   // bodies of items
//     await caller.close();
//
// Leaving a loop early cancels its stream. Errors of services are `MotetError`s with their `code`.

import { randomBytes } from "node:crypto";
import { decode, encode } from "@msgpack/msgpack";
import { connect } from "@nats-io/transport-node";

const VERSION = 2;
const CREDIT = 64; // items that may be on their way
const OPEN_AGAIN_MS = 250; // doubled each time
const ATTEMPTS = 5;
const SILENCE_MS = 650; // after which a worker is lost: it sends a Keepalive every 200 ms

export class MotetError extends Error {
  constructor(code, message, retryable = false, param = null) {
    super(message);
    Object.assign(this, { name: "MotetError", code, retryable, param });
  }
}

export class Caller {
  #connection;
  #streams = new Map();
  #number = 0;

  constructor(connection, role, instance) {
    this.#connection = connection;
    this.role = role;
    this.instance = instance;
    this.inbox = `motet.v2.inbox.${role}.${instance}`;
  }

  /** Connects as the NATS user `role`, with an instance id that no other process has had. */
  static async connect({ url, password, role = "gateway" }) {
    const instance = `${role}-${randomBytes(4).toString("hex")}`;
    const connection = await connect({
      servers: url,
      user: role,
      pass: password,
      inboxPrefix: `motet.v2.inbox.${role}.${instance}.r`,
    });
    const caller = new Caller(connection, role, instance);
    await caller.#subscribe();
    return caller;
  }

  async close() {
    await this.#connection.close();
  }

  /** Yields the bodies of a stream's items. `body.type` names the operation. */
  async *open(role, body, { deadlineMs = null } = {}) {
    const stream = new Stream(++this.#number);
    const request = {
      type: "open",
      v: VERSION,
      caller: this.instance,
      stream: stream.number,
      credit: CREDIT,
      deadline_ms: deadlineMs,
      body,
    };
    const reply = `${this.inbox}.open.${stream.number}`;
    const send = () =>
      this.#connection.publish(`motet.v2.${role}.${body.type}`, encode(request), { reply });
    this.#streams.set(stream.number, stream);
    try {
      stream.watch(send);
      yield* this.#items(stream);
    } finally {
      stream.unwatch();
      this.#streams.delete(stream.number);
      if (!stream.ended) this.#control(stream, ["x", stream.number]); // Cancel
    }
  }

  async *#items(stream) {
    let granted = CREDIT;
    for (let taken = 1; ; taken++) {
      const { done, body } = await stream.next();
      if (done) return;
      yield body;
      if (granted - taken <= CREDIT / 2) {
        granted = taken + CREDIT;
        this.#control(stream, ["c", stream.number, granted]); // Credit
      }
    }
  }

  async #subscribe() {
    const listen = (subject, callback) =>
      this.#connection.subscribe(subject, {
        callback: (error, message) => error ?? callback(message),
      });
    listen(`${this.inbox}.frames`, (message) => this.#onFrames(decode(message.data)));
    listen(`${this.inbox}.open.*`, (message) => this.#onRefusal(message));
    // Probes: an empty list of controls; a caller that does not answer is taken for dead.
    listen(`motet.v2.${this.role}.i.${this.instance}.ctl`, (message) =>
      message.respond(encode(["p", VERSION, this.instance, "ready"])),
    );
    await this.#connection.flush();
  }

  #onFrames([, , sender, frames]) {
    for (const frame of frames) {
      const stream = this.#streams.get(frame[1]);
      if (stream?.sender && stream.sender !== sender) {
        if (frame[0] === "a") this.#control({ sender }, ["x", frame[1]]); // a second instance
        continue;
      }
      stream?.take(frame, sender);
    }
  }

  #onRefusal(message) {
    const stream = this.#streams.get(Number(message.subject.split(".").pop()));
    if (message.headers?.code === 503) {
      stream?.fail(new MotetError("unavailable", "no instance of this role is there", true));
    } else if (message.data.length) {
      const [, , , [[, , , code, text, retryable, param]]] = decode(message.data);
      stream?.fail(new MotetError(code, text, retryable, param));
    }
  }

  #control({ sender }, control) {
    if (!sender) return; // no instance has accepted yet
    const subject = `motet.v2.${sender.split("-")[0]}.i.${sender}.ctl`;
    this.#connection.publish(subject, encode(["k", VERSION, this.instance, [control]]));
  }
}

class Stream {
  #arrived = []; // bodies that were not taken yet
  #received = 0; // items
  #error = null;
  #wake = () => {};
  #timer = null;
  #heard = 0; // when the last frame came, in ms

  constructor(number) {
    this.number = number;
    this.sender = null; // instance that has accepted
    this.ended = false;
  }

  /** Resolves to the next item's body, or to the end. Rejects with the error of the stream. */
  async next() {
    for (;;) {
      if (this.#arrived.length) return { done: false, body: this.#arrived.shift() };
      if (this.#error) throw this.#error;
      if (this.ended) return { done: true };
      await new Promise((resolve) => (this.#wake = resolve));
    }
  }

  fail(error) {
    this.#error = error;
    this.ended = true;
    this.#wake();
  }

  /** Takes a frame: Accepted, Item, Keepalive, End or Error. */
  take([tag, , seq, ...rest], sender) {
    this.#heard = Date.now();
    this.sender = sender;
    if (tag === "a") return;
    if (seq !== this.#received) {
      this.#error = new MotetError("stream_gap", `${sender}: frame ${this.#received} is missing`, true);
    } else if (tag === "i") {
      this.#received++;
      this.#arrived.push(rest[0]);
    } else if (tag === "e") {
      this.ended = true;
    } else if (tag === "!") {
      this.ended = true;
      this.#error = new MotetError(...rest);
    }
    this.#wake();
  }

  /** Sends the open until an instance accepts, then watches that instance. */
  watch(send, attempt = 0) {
    if (this.ended) return;
    if (this.sender) {
      if (Date.now() - this.#heard > SILENCE_MS) {
        this.fail(new MotetError("worker_lost", `${this.sender} is silent`, true));
      } else {
        this.#timer = setTimeout(() => this.watch(send), SILENCE_MS / 4);
      }
    } else if (attempt > ATTEMPTS) {
      this.fail(new MotetError("unavailable", "no instance has accepted", true));
    } else {
      send();
      this.#timer = setTimeout(() => this.watch(send, attempt + 1), OPEN_AGAIN_MS * 2 ** attempt);
    }
  }

  unwatch() {
    clearTimeout(this.#timer);
  }
}
