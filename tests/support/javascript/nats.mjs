// As much of @nats-io/transport-node as examples/javascript uses, for machines that npm cannot serve.

import { createConnection } from "node:net";

export async function connect({ servers, user, pass }) {
  const { hostname, port } = new URL(servers);
  const socket = createConnection({ host: hostname, port: Number(port) });
  const connection = new Connection(socket);
  await new Promise((resolve, reject) => {
    socket.once("error", reject);
    socket.once("connect", resolve);
  });
  const options = { user, pass, verbose: false, pedantic: false, headers: true, no_responders: true };
  connection.send(`CONNECT ${JSON.stringify(options)}\r\n`);
  await connection.flush();
  return connection;
}

class Connection {
  #socket;
  #received = Buffer.alloc(0);
  #callbacks = new Map();
  #pongs = [];

  constructor(socket) {
    this.#socket = socket;
    socket.on("data", (data) => {
      this.#received = Buffer.concat([this.#received, data]);
      while (this.#take());
    });
  }

  send(text, data = null) {
    this.#socket.write(text);
    if (data) this.#socket.write(Buffer.concat([data, Buffer.from("\r\n")]));
  }

  publish(subject, data, { reply = "" } = {}) {
    this.send(`PUB ${subject} ${reply} ${data.length}\r\n`, data);
  }

  subscribe(subject, { callback }) {
    this.#callbacks.set(String(this.#callbacks.size + 1), callback);
    this.send(`SUB ${subject} ${this.#callbacks.size}\r\n`);
  }

  flush() {
    const pong = new Promise((resolve) => this.#pongs.push(resolve));
    this.send("PING\r\n");
    return pong;
  }

  async close() {
    this.#socket.destroy();
  }

  /** Takes one protocol line, with its payload, out of what was received. */
  #take() {
    const end = this.#received.indexOf("\r\n");
    if (end < 0) return false;
    const [verb, ...words] = this.#received.subarray(0, end).toString().split(" ");
    const hasPayload = verb === "MSG" || verb === "HMSG";
    const size = hasPayload ? Number(words.at(-1)) : 0;
    const from = end + 2;
    if (this.#received.length < from + size + (hasPayload ? 2 : 0)) return false;
    const payload = this.#received.subarray(from, from + size);
    this.#received = this.#received.subarray(from + size + (hasPayload ? 2 : 0));
    if (verb === "PING") this.send("PONG\r\n");
    else if (verb === "PONG") this.#pongs.shift()?.();
    else if (verb === "-ERR") throw new Error(words.join(" "));
    else if (hasPayload) this.#deliver(words, payload, verb === "HMSG");
    return true;
  }

  #deliver(words, payload, withHeaders) {
    const lengths = withHeaders ? 2 : 1;
    const [subject, id, reply] = words.slice(0, words.length - lengths);
    const cut = withHeaders ? Number(words.at(-2)) : 0;
    const code = Number(payload.subarray(0, cut).toString().split(/\s/)[1]);
    this.#callbacks.get(id)(null, {
      subject,
      data: payload.subarray(cut),
      headers: withHeaders ? { code } : undefined,
      respond: (data) => this.publish(reply, data),
    });
  }
}
