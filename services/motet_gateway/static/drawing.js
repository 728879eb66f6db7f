// A picture that forms: its estimates one after another in a message of the model, then the picture itself.

import { streamPicture } from "./api.js";
import { picture } from "./attachments.js";
import { bubble, remove, show } from "./bubbles.js";

const ESTIMATES = 3;

export class Drawing {
  #text = bubble("assistant");
  #image = null;
  #began = performance.now();
  #prompt;

  constructor(prompt) {
    this.#prompt = prompt;
    this.#text.textContent = "Drawing…";
  }

  // Draws it; `told` is given each line about how far it is. The picture as a data URI. ApiError if there is none.
  async run(model, key, signal, told) {
    const body = { model, prompt: this.#prompt, partial_images: ESTIMATES, progress: true };
    try {
      for await (const event of streamPicture(body, key, signal)) {
        if (event.type.endsWith(".progress")) told(`step ${event.step} of ${event.steps}`);
        else this.#show(`data:image/${event.output_format};base64,${event.b64_json}`);
      }
    } catch (error) {
      remove(this.#text);
      throw error;
    }
    told(`picture in ${((performance.now() - this.#began) / 1000).toFixed(1)} s`);
    show(() => this.#text.remove());
    this.#image.alt = this.#prompt;
    return this.#image.src;
  }

  // A button below the picture.
  offer(label, work) {
    const button = document.createElement("button");
    [button.type, button.className, button.textContent] = ["button", "quiet", label];
    button.addEventListener("click", work);
    show(() => this.#image.after(button));
  }

  #show(url) {
    show(() => {
      if (this.#image) this.#image.src = url;
      else this.#text.before((this.#image = picture(url, `${this.#prompt} (forming)`)));
    });
  }
}
