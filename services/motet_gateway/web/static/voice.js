// A spoken conversation: what the microphone hears goes to the server, what the server says is played and captioned.
//
// Who has the floor is decided by the server: it tells of speech that interrupts, and keeps a cough to itself. Then the
// loudspeaker falls silent at once, and the server is told what had been heard, so that both remember the same words.

import { ApiError } from "./api.js";
import { Latency } from "./latency.js";
import { Microphone, RATE } from "./microphone.js";
import { Player } from "./player.js";
import { fromBase64, Realtime, toBase64 } from "./realtime.js";
import { Reply } from "./reply.js";
import { Turn } from "./turn.js";

const HEARD = "conversation.item.input_audio_transcription";
const MS = RATE / 1000; // samples
const HUSH = 500; // ms that the loudspeaker has to tell what it had played

export class Voice {
  #history;
  #view; // state(name), problem(text), ended(reason)
  #socket;
  #microphone;
  #player;
  #detection; // the session's turn_detection
  #turns = new Map(); // by item
  #replies = new Map(); // by item
  #early = []; // packets that were heard before the server could
  #sent = 0; // samples
  #sentAt = 0; // ms
  #userSpeaks = false;
  #waiting = null; // Latency of the last turn, until a response answers it
  #waitingItem = null; // of that turn, if it was spoken
  #response = null; // {id, latency} of the response that is under way
  #playing = null; // item
  #owed = false; // a text was sent that has no response yet
  #hushes = []; // stops of the loudspeaker of which it has not told yet
  #muted = false;

  // `settings`: as in settings.js; `history`: messages so far, which grows. ApiError or DeviceError if it cannot be.
  static async open(settings, history, view) {
    const voice = new Voice();
    [voice.#history, voice.#view] = [history, view];
    try {
      await voice.#start(settings);
    } catch (error) {
      voice.close();
      throw error;
    }
    return voice;
  }

  async #start(settings) {
    const lost = (reason) => this.#view.ended(reason);
    this.#player = await Player.open((report) => this.#reports[report.kind]?.(report));
    this.#microphone = await Microphone.open({ heard: (packet) => this.#send(packet), lost });
    const hear = (event) => this.#events[event.type]?.(event);
    this.#socket = await Realtime.connect(settings.model, settings.key, { hear, closed: lost });
    if (!this.#detection) throw new ApiError("The server detects no turns: its voice activity service (vad) is missing.");
    this.#configure(settings);
    for (const packet of this.#early.splice(0)) this.#send(packet);
    this.#tellState();
  }

  #configure({ system, temperature, most, voice }) {
    const session = { type: "realtime", instructions: system, temperature, max_output_tokens: most ?? "inf" };
    const audio = { input: { transcription: {} }, ...(voice && { output: { voice } }) };
    this.#socket.send("session.update", { session: { ...session, audio } });
    for (const { role, content } of this.#history) if (content) this.#create(role, content);
  }

  #create(role, text) {
    const type = role === "user" ? "input_text" : "output_text";
    this.#socket.send("conversation.item.create", { item: { type: "message", role, content: [{ type, text }] } });
  }

  // -------------------------------------------------------------------------------------------------- the user's side
  get analysers() {
    return { user: this.#microphone.analyser, model: this.#player.analyser };
  }

  set muted(muted) {
    this.#microphone.muted = this.#muted = muted;
    this.#tellState();
  }

  // A text instead of speech; it is in the history already. What is being said makes room for it.
  say(text) {
    this.interrupt();
    this.#create("user", text);
    this.#wait(new Latency(performance.now()), null);
    this.#owed = true;
    this.#ask();
    this.#tellState();
  }

  // Asks for a reply, once the one before has ended and the server knows what was heard of it.
  #ask() {
    if (!this.#owed || this.#response || this.#hushes.length) return;
    this.#owed = false;
    this.#socket.send("response.create");
  }

  // Ends the reply.
  interrupt() {
    if (this.#response) this.#socket.send("response.cancel", { response_id: this.#response.id });
    this.#silence();
  }

  close() {
    this.#owed = false;
    for (const reply of this.#replies.values()) reply.cut();
    this.#socket?.close();
    this.#microphone?.close();
    this.#player?.close();
  }

  #send(packet) {
    if (!this.#socket) return this.#early.push(packet);
    this.#sent += packet.length;
    this.#sentAt = performance.now();
    this.#socket.send("input_audio_buffer.append", { audio: toBase64(packet) });
  }

  // When a moment of the sound that was sent had been; `ms` as the server counts.
  #heardAt(ms) {
    return this.#sentAt - (this.#sent / MS - ms);
  }

  // ------------------------------------------------------------------------------------------------------- the server's
  #events = {
    "session.created": ({ session }) => (this.#detection = session.audio.input.turn_detection),
    error: ({ error }) => {
      if (error.code !== "response_cancel_not_active") this.#view.problem(error.message); // it ended by itself just then
    },

    "input_audio_buffer.speech_started": () => {
      this.#userSpeaks = true;
      this.#silence();
      this.#tellState();
    },
    "input_audio_buffer.speech_stopped": ({ audio_end_ms, item_id }) => {
      this.#userSpeaks = false;
      const silence = this.#detection.silence_duration_ms ?? 0;
      this.#wait(new Latency(this.#heardAt(audio_end_ms - silence)), item_id);
      this.#waiting.mark("ended");
      this.#tellState();
    },
    "input_audio_buffer.committed": ({ item_id }) => this.#turn(item_id),
    [`${HEARD}.delta`]: ({ item_id, delta }) => this.#turn(item_id).hear(delta),
    [`${HEARD}.completed`]: ({ item_id, transcript }) => {
      this.#turn(item_id).settle(transcript);
      this.#turns.delete(item_id);
      if (item_id !== this.#waitingItem) return;
      if (transcript) this.#waiting?.mark("understood");
      else this.#waiting = null;
      this.#tellState();
    },
    [`${HEARD}.failed`]: ({ item_id, error }) => {
      this.#turn(item_id).drop();
      this.#turns.delete(item_id);
      this.#view.problem(`That was not understood: ${error.message}`);
    },

    "response.created": ({ response }) => {
      this.#response = { id: response.id, latency: this.#waiting };
      this.#waiting = null;
      this.#tellState();
    },
    "response.output_item.added": ({ item }) => {
      if (item.type !== "message") return;
      const reply = new Reply(this.#response.latency);
      this.#response.latency = null;
      this.#replies.set(item.id, reply);
      this.#history.push(reply.entry);
    },
    "response.output_audio.delta": ({ item_id, delta }) => {
      const reply = this.#replies.get(item_id);
      if (!reply || reply.silenced) return;
      const samples = fromBase64(delta);
      reply.sound(samples.length);
      this.#player.push(item_id, samples);
    },
    "response.output_audio_transcript.delta": ({ item_id, delta }) => this.#replies.get(item_id)?.say(delta),
    "response.output_audio.done": ({ item_id }) => this.#player.end(item_id),
    "response.output_text.delta": ({ item_id, delta }) => this.#replies.get(item_id)?.write(delta),
    "response.output_item.done": ({ item }) => {
      const text = item.content?.[0]?.transcript ?? item.content?.[0]?.text ?? "";
      if (this.#replies.get(item.id)?.complete(text)) this.#replies.delete(item.id);
    },
    "response.done": ({ response }) => this.#responseDone(response),
    "conversation.item.truncated": ({ item_id }) => {
      const reply = this.#replies.get(item_id);
      if (reply?.whole) this.#socket.send("conversation.item.retrieve", { item_id });
      else if (reply) reply.truncated = true;
    },
    "conversation.item.retrieved": ({ item }) => {
      this.#replies.get(item.id)?.cut(item.content[0].transcript);
      this.#replies.delete(item.id);
    },
  };

  #wait(latency, item) {
    [this.#waiting, this.#waitingItem] = [latency, item];
  }

  #turn(itemId) {
    let turn = this.#turns.get(itemId);
    if (!turn) {
      turn = new Turn();
      this.#turns.set(itemId, turn);
      this.#history.push(turn.entry);
    }
    return turn;
  }

  #responseDone({ status, status_details: details }) {
    this.#response = null;
    if (status === "failed") this.#view.problem(details.error.message);
    if (status === "cancelled") this.#silence();
    this.#ask();
    this.#tellState();
  }

  // ---------------------------------------------------------------------------------------------------- the loudspeaker's
  #reports = {
    started: ({ item }) => {
      this.#playing = item;
      this.#replies.get(item)?.started(performance.now() + this.#player.latency * 1000);
      this.#tellState();
    },
    progress: ({ item, played }) => this.#replies.get(item)?.hear(this.#heardOf(played)),
    ended: ({ item }) => {
      this.#playing = null;
      this.#replies.get(item)?.end();
      this.#replies.delete(item);
      this.#tellState();
    },
    stopped: ({ item, played }) => {
      this.#playing = null;
      const heard = Math.floor(this.#heardOf(played) / MS);
      this.#socket.send("conversation.item.truncate", { item_id: item, content_index: 0, audio_end_ms: heard });
      this.#tellState();
    },
    silent: () => this.#hushed(this.#hushes[0]),
  };

  // Of the samples that were played, those that have come out.
  #heardOf(played) {
    return Math.max(0, played - Math.round(this.#player.latency * RATE));
  }

  #silence() {
    for (const reply of this.#replies.values()) reply.silenced = true;
    const hush = {};
    this.#hushes.push(hush);
    setTimeout(() => this.#hushed(hush), HUSH);
    this.#player.stop();
  }

  #hushed(hush) {
    this.#hushes = this.#hushes.filter((other) => other !== hush);
    this.#ask();
  }

  #tellState() {
    const replying = this.#response || this.#waiting;
    const state = this.#userSpeaks ? "hearing" : this.#playing ? "speaking" : replying ? "thinking" : "listening";
    this.#view.state(this.#muted && state === "listening" ? "muted" : state);
  }
}
