// Starts, mutes and ends spoken conversations, and shows why they are unavailable.

import { ApiError, readSpeech } from "../common/api.js";
import { setSpoken } from "../chat/bubbles.js";
import { DeviceError } from "./microphone.js";
import { lockModel, settings } from "../common/settings.js";
import { Voice } from "./voice.js";
import { Waveform } from "./waveform.js";

const $ = (id) => document.getElementById(id);
const NEEDED = { asr: "speech recognition (--asr) and this model does not hear", vad: "voice activity detection (vad)" };
const STATES = {
  listening: "Listening. Speak, or type.",
  hearing: "You are speaking…",
  thinking: "Thinking…",
  speaking: "Speaking. Speak to interrupt.",
  muted: "Muted. No audio is sent.",
};

export class Talk {
  #history; // returns a promise of the messages
  #problem; // shows an error message
  #ended;
  #voice = null;
  #waveform = null;
  #starting = false;
  #unavailable = ""; // the reason why, if voice is unavailable
  #hears = false; // the model gets the user's sound
  #checking = 0; // timer of the next check

  // `ended` is called after a spoken conversation.
  constructor(history, problem, ended) {
    [this.#history, this.#problem, this.#ended] = [history, problem, ended];
    $("talk").addEventListener("click", () => (this.#voice ? this.end() : this.#begin()));
    $("mute").addEventListener("click", () => this.#mute($("mute").getAttribute("aria-pressed") !== "true"));
    $("stop-reply").addEventListener("click", () => this.#voice?.interrupt());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.#voice?.interrupt();
    });
  }

  get on() {
    return this.#voice !== null;
  }

  sendText(text) {
    this.#voice.sendText(text);
  }

  // Checks whether one can talk with the chosen model, repeatedly while services are missing: models take time to load.
  async check(tries = 40) {
    clearTimeout(this.#checking);
    const { model } = settings();
    const speech = await readSpeech(model);
    if (model !== settings().model) return; // another one was chosen meanwhile
    this.#hears = speech.hears;
    const parts = speech.missing.filter((role) => role in NEEDED).map((role) => NEEDED[role]);
    this.#unavailable = parts.length ? `Voice is unavailable: this server runs no ${parts.join(" and no ")}.` : "";
    $("talk").setAttribute("aria-disabled", String(Boolean(this.#unavailable)));
    $("talk").title = this.#unavailable;
    $("talk-unavailable").textContent = this.#unavailable;
    if (this.#unavailable && tries > 0) this.#checking = setTimeout(() => this.check(tries - 1), 3000);
  }

  end(reason = "") {
    const wasOn = this.on;
    this.#voice?.close();
    this.#waveform?.close();
    this.#voice = this.#waveform = null;
    this.#problem(reason);
    this.#draw();
    if (wasOn) this.#ended();
  }

  async #begin() {
    if (this.#unavailable || this.#starting) return this.#problem(this.#unavailable);
    this.#starting = true;
    this.#problem("");
    $("talk-label").textContent = "Wait…";
    const view = {
      state: (name) => this.#show(name),
      problem: this.#problem,
      ended: (reason) => this.end(reason),
    };
    try {
      this.#voice = await Voice.open({ ...settings(), hears: this.#hears }, await this.#history(), view);
    } catch (error) {
      if (!(error instanceof ApiError || error instanceof DeviceError)) throw error;
      this.#problem(error.message);
    } finally {
      this.#starting = false;
      this.#draw();
    }
  }

  #mute(muted) {
    this.#voice.muted = muted;
    $("mute").setAttribute("aria-pressed", String(muted));
  }

  #show(state) {
    $("voice-state").textContent = STATES[state];
    $("voice-state").dataset.state = state;
    $("stop-reply").hidden = state !== "speaking" && state !== "thinking";
  }

  #draw() {
    const on = this.on;
    $("talk").classList.toggle("on", on);
    $("talk-label").textContent = on ? "End" : "Talk";
    $("voice").hidden = !on;
    $("mute").setAttribute("aria-pressed", "false");
    lockModel(on);
    setSpoken(on);
    if (on && !this.#waveform) this.#waveform = new Waveform($("waveform"), this.#voice.analysers);
  }
}
