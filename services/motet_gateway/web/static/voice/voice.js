// Runs a spoken conversation: sends the microphone's audio, plays and captions the replies.
//
// The server decides what interrupts a reply and reports it. Playback then stops at once, and the page reports the played
// length, so that both keep the same words in the history.

import { ApiError } from "../common/api.js";
import { Latency } from "./latency.js";
import { Microphone, RATE } from "./microphone.js";
import { Player } from "./player.js";
import { fromBase64, Realtime, toBase64 } from "./realtime.js";
import { Recording, soundOf } from "./recording.js";
import { Reply } from "./reply.js";
import { Turn } from "./turn.js";

const TRANSCRIPTION = "conversation.item.input_audio_transcription";
const MS = RATE / 1000; // samples
const STOP_TIMEOUT = 500; // ms to wait for the player's report after a stop

export class Voice {
  #history;
  #view; // state(name), problem(text), ended(reason)
  #socket;
  #microphone;
  #player;
  #detection; // the session's turn_detection
  #turns = new Map(); // by item
  #recording = null; // of the sent audio, where nothing transcribes it
  #replies = new Map(); // by item
  #unsent = []; // packets recorded before the session was open
  #sent = 0; // samples
  #sentAt = 0; // ms
  #userSpeaks = false;
  #pendingLatency = null; // of the last turn, until a response answers it
  #pendingItem = null; // its item id, if it was spoken
  #response = null; // {id, latency} of the current response
  #playing = null; // item id
  #responseOwed = false; // a sent text has no response yet
  #pendingStops = []; // stops that the player has not reported yet
  #muted = false;

  // `settings`: of settings.js; `history`: the messages, which it appends to. Throws ApiError or DeviceError.
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
    this.#microphone = await Microphone.open({ onPacket: (packet) => this.#send(packet), onLost: lost });
    const onEvent = (event) => this.#events[event.type]?.(event);
    this.#socket = await Realtime.connect(settings.model, settings.key, { onEvent, onClose: lost });
    if (!this.#detection) throw new ApiError("The server does not detect turns: its voice activity service (vad) is not running.");
    this.#configure(settings);
    for (const packet of this.#unsent.splice(0)) this.#send(packet);
    this.#updateState();
  }

  #configure({ system, temperature, maxTokens, voice, hears, asrModel }) {
    const session = { type: "realtime", instructions: system, temperature, max_output_tokens: maxTokens ?? "inf" };
    const input = { ...(asrModel && { transcription: {} }), ...(hears && { model_input: "audio" }) };
    if (!asrModel) this.#recording = new Recording();
    this.#socket.send("session.update", { session: { ...session, audio: { input, ...(voice && { output: { voice } }) } } });
    for (const { role, content, files = [] } of this.#history) {
      if (content) this.#create(role, textPart(role, content));
      else if (hears) for (const { spoken, url } of files) if (spoken) this.#create(role, { type: "input_audio", audio: soundOf(url) });
    }
  }

  #create(role, part) {
    this.#socket.send("conversation.item.create", { item: { type: "message", role, content: [part] } });
  }

  // -------------------------------------------------------------------------------------------------- the user's side
  get analysers() {
    return { user: this.#microphone.analyser, model: this.#player.analyser };
  }

  set muted(muted) {
    this.#microphone.muted = this.#muted = muted;
    this.#updateState();
  }

  // Sends a text instead of speech; it is already in the history. It interrupts the current reply.
  sendText(text) {
    this.interrupt();
    this.#create("user", textPart("user", text));
    this.#expectResponse(new Latency(performance.now()), null);
    this.#responseOwed = true;
    this.#requestResponse();
    this.#updateState();
  }

  // Requests a response after the previous one has ended and its played length was reported.
  #requestResponse() {
    if (!this.#responseOwed || this.#response || this.#pendingStops.length) return;
    this.#responseOwed = false;
    this.#socket.send("response.create");
  }

  // Interrupts the reply.
  interrupt() {
    if (this.#response) this.#socket.send("response.cancel", { response_id: this.#response.id });
    this.#stopPlayback();
  }

  close() {
    this.#responseOwed = false;
    for (const reply of this.#replies.values()) reply.truncate();
    this.#socket?.close();
    this.#microphone?.close();
    this.#player?.close();
  }

  #send(packet) {
    if (!this.#socket) return this.#unsent.push(packet);
    this.#recording?.add(packet);
    this.#sent += packet.length;
    this.#sentAt = performance.now();
    this.#socket.send("input_audio_buffer.append", { audio: toBase64(packet) });
  }

  // Converts a position in the sent audio, in the server's ms, to the page's clock.
  #timeOf(ms) {
    return this.#sentAt - (this.#sent / MS - ms);
  }

  // ------------------------------------------------------------------------------------------------------- the server's
  #events = {
    "session.created": ({ session }) => (this.#detection = session.audio.input.turn_detection),
    error: ({ error }) => {
      if (error.code !== "response_cancel_not_active") this.#view.problem(error.message); // it had just ended
    },

    "input_audio_buffer.speech_started": ({ audio_start_ms }) => {
      this.#userSpeaks = true;
      this.#recording?.begin(audio_start_ms * MS);
      this.#stopPlayback();
      this.#updateState();
    },
    "input_audio_buffer.speech_stopped": ({ audio_end_ms, item_id }) => {
      this.#userSpeaks = false;
      const silence = this.#detection.silence_duration_ms ?? 0;
      this.#expectResponse(new Latency(this.#timeOf(audio_end_ms - silence)), item_id);
      this.#pendingLatency.mark("speechEnded");
      this.#recording?.end(audio_end_ms * MS);
      this.#updateState();
    },
    "input_audio_buffer.committed": ({ item_id }) => {
      const turn = this.#turn(item_id);
      if (!this.#recording) return;
      turn.keep(this.#recording.take());
      this.#turns.delete(item_id);
    },
    [`${TRANSCRIPTION}.delta`]: ({ item_id, delta }) => this.#turn(item_id).append(delta),
    [`${TRANSCRIPTION}.completed`]: ({ item_id, transcript }) => {
      this.#turn(item_id).finish(transcript);
      this.#turns.delete(item_id);
      if (item_id !== this.#pendingItem) return;
      if (transcript) this.#pendingLatency?.mark("transcribed");
      else this.#pendingLatency = null;
      this.#updateState();
    },
    [`${TRANSCRIPTION}.failed`]: ({ item_id, error }) => {
      this.#turn(item_id).drop();
      this.#turns.delete(item_id);
      this.#view.problem(`The transcription failed: ${error.message}`);
    },

    "response.created": ({ response }) => {
      this.#response = { id: response.id, latency: this.#pendingLatency };
      this.#pendingLatency = null;
      this.#updateState();
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
      if (!reply || reply.stopped) return;
      const samples = fromBase64(delta);
      reply.addAudio(samples.length);
      this.#player.push(item_id, samples);
    },
    "response.output_audio_transcript.delta": ({ item_id, delta }) => this.#replies.get(item_id)?.addTranscript(delta),
    "response.output_audio.done": ({ item_id }) => this.#player.end(item_id),
    "response.output_text.delta": ({ item_id, delta }) => this.#replies.get(item_id)?.addText(delta),
    "response.output_item.done": ({ item }) => {
      const text = item.content?.[0]?.transcript ?? item.content?.[0]?.text ?? "";
      if (this.#replies.get(item.id)?.finish(text)) this.#replies.delete(item.id);
    },
    "response.done": ({ response }) => this.#responseDone(response),
    "conversation.item.truncated": ({ item_id }) => {
      const reply = this.#replies.get(item_id);
      if (reply?.finished) this.#socket.send("conversation.item.retrieve", { item_id });
      else if (reply) reply.truncated = true;
    },
    "conversation.item.retrieved": ({ item }) => {
      this.#replies.get(item.id)?.truncate(item.content[0].transcript);
      this.#replies.delete(item.id);
    },
  };

  #expectResponse(latency, item) {
    [this.#pendingLatency, this.#pendingItem] = [latency, item];
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
    if (status === "cancelled") this.#stopPlayback();
    this.#requestResponse();
    this.#updateState();
  }

  // ---------------------------------------------------------------------------------------------------- the loudspeaker's
  #reports = {
    started: ({ item }) => {
      this.#playing = item;
      this.#replies.get(item)?.started(performance.now() + this.#player.latency * 1000);
      this.#updateState();
    },
    progress: ({ item, played }) => this.#replies.get(item)?.markPlayed(this.#heardSamples(played)),
    ended: ({ item }) => {
      this.#playing = null;
      this.#replies.get(item)?.end();
      this.#replies.delete(item);
      this.#updateState();
    },
    stopped: ({ item, played }) => {
      this.#playing = null;
      const heard = Math.floor(this.#heardSamples(played) / MS);
      this.#socket.send("conversation.item.truncate", { item_id: item, content_index: 0, audio_end_ms: heard });
      this.#updateState();
    },
    silent: () => this.#playbackStopped(this.#pendingStops[0]),
  };

  // Returns how many of the rendered samples have been output.
  #heardSamples(played) {
    return Math.max(0, played - Math.round(this.#player.latency * RATE));
  }

  #stopPlayback() {
    for (const reply of this.#replies.values()) reply.stopped = true;
    const stop = {};
    this.#pendingStops.push(stop);
    setTimeout(() => this.#playbackStopped(stop), STOP_TIMEOUT);
    this.#player.stop();
  }

  #playbackStopped(stop) {
    this.#pendingStops = this.#pendingStops.filter((other) => other !== stop);
    this.#requestResponse();
  }

  #updateState() {
    const replying = this.#response || this.#pendingLatency;
    const state = this.#userSpeaks ? "hearing" : this.#playing ? "speaking" : replying ? "thinking" : "listening";
    this.#view.state(this.#muted && state === "listening" ? "muted" : state);
  }
}

const textPart = (role, text) => ({ type: role === "user" ? "input_text" : "output_text", text });
