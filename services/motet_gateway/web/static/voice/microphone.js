// Opens the microphone: packets of 24 kHz PCM, silence while muted.

export const RATE = 24000;
const PACKET = 768; // samples: 32 ms, a frame of voice activity detection
const MESSAGES = {
  NotAllowedError: "The browser may not use the microphone. Allow it in the settings of this site, then press Talk again.",
  NotFoundError: "No microphone was found. Connect one, then press Talk again.",
  NotReadableError: "The microphone cannot be used: another program may be using it, or the system blocks it.",
  SecurityError: "The browser blocks the microphone.",
  AbortError: "The microphone did not start. Press Talk to try again.",
};

// Reports a device that cannot be used, in the user's words.
export class DeviceError extends Error {}

export class Microphone {
  #context;
  #stream;
  analyser;

  // `onPacket` gets every packet (Int16Array), `onLost` a message when the device is disconnected.
  static async open({ onPacket, onLost }) {
    if (!navigator.mediaDevices) {
      throw new DeviceError("Browsers allow the microphone only over https or on localhost.");
    }
    const microphone = new Microphone();
    try {
      await microphone.#start(onPacket, onLost);
    } catch (error) {
      microphone.close();
      throw new DeviceError(MESSAGES[error.name] ?? `The microphone cannot be used: ${error.message}`);
    }
    return microphone;
  }

  async #start(onPacket, onLost) {
    // Before the microphone is opened: what is said while the module loads would be lost.
    // At the device's rate: not every browser resamples input, so the worklet does.
    this.#context = new AudioContext({ latencyHint: "interactive" });
    await this.#context.audioWorklet.addModule("voice/capture-worklet.js");
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    this.#stream = await navigator.mediaDevices.getUserMedia({ audio });
    const source = this.#context.createMediaStreamSource(this.#stream);
    const options = { channelCount: 1, channelCountMode: "explicit", processorOptions: { rate: RATE, samples: PACKET } };
    const capture = new AudioWorkletNode(this.#context, "capture", options);
    capture.port.onmessage = ({ data }) => onPacket(data);
    this.analyser = this.#context.createAnalyser();
    // Browsers run only nodes that are connected to the output; this one outputs silence.
    source.connect(this.analyser).connect(capture).connect(this.#context.destination);
    this.#stream.getAudioTracks()[0].addEventListener("ended", () => onLost("The microphone was disconnected."));
    // Some browsers start audio only after a click or while a microphone is open; it is now.
    this.#context.resume();
  }

  set muted(muted) {
    for (const track of this.#stream.getAudioTracks()) track.enabled = !muted;
  }

  close() {
    for (const track of this.#stream?.getTracks() ?? []) track.stop();
    this.#context?.close();
  }
}
