// The microphone: packets of 24 kHz PCM for as long as it is open, silence while it is muted.

export const RATE = 24000;
const PACKET = 768; // samples: 32 ms, what voice activity is told from at a time
const WORDS = {
  NotAllowedError: "The browser may not use the microphone. Allow it in the settings of this site, then press Talk again.",
  NotFoundError: "No microphone was found. Connect one, then press Talk again.",
  NotReadableError: "The microphone cannot be used: another program may hold it, or the system keeps it from the browser.",
  SecurityError: "The browser keeps pages from using the microphone.",
  AbortError: "The microphone did not start. Press Talk to try again.",
};

// What is wrong with the device, in words.
export class DeviceError extends Error {}

export class Microphone {
  #context;
  #stream;
  analyser;

  // `heard` gets every packet (Int16Array), `lost` the reason (text) when the device goes away.
  static async open({ heard, lost }) {
    if (!navigator.mediaDevices) {
      throw new DeviceError("Browsers let a page hear only over https, or on this machine (localhost).");
    }
    const microphone = new Microphone();
    try {
      await microphone.#start(heard, lost);
    } catch (error) {
      microphone.close();
      throw new DeviceError(WORDS[error.name] ?? `The microphone cannot be used: ${error.message}`);
    }
    return microphone;
  }

  async #start(heard, lost) {
    const audio = { channelCount: 1, echoCancellation: true, noiseSuppression: true, autoGainControl: true };
    this.#stream = await navigator.mediaDevices.getUserMedia({ audio });
    // At the device's own rate: not every browser converts what comes in, so the worklet does.
    this.#context = new AudioContext({ latencyHint: "interactive" });
    await this.#context.audioWorklet.addModule("capture-worklet.js");
    const source = this.#context.createMediaStreamSource(this.#stream);
    const options = { channelCount: 1, channelCountMode: "explicit", processorOptions: { rate: RATE, samples: PACKET } };
    const capture = new AudioWorkletNode(this.#context, "capture", options);
    capture.port.onmessage = ({ data }) => heard(data);
    this.analyser = this.#context.createAnalyser();
    // Only what leads to the output is sure to run; this gives silence there.
    source.connect(this.analyser).connect(capture).connect(this.#context.destination);
    this.#stream.getAudioTracks()[0].addEventListener("ended", () => lost("The microphone was disconnected."));
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
