// Shows an image generation: its estimates, one after another, then the picture.

import { element } from "../common/elements.js";
import { bubble, remove, show } from "./bubbles.js";

const ESTIMATES = 3;

// Options for partial images and progress, for a direct request or a tool of the model.
export const STREAM_OPTIONS = { partial_images: ESTIMATES, progress: true };
export const TOOL = { type: "image_generation", ...STREAM_OPTIONS };

// Returns a picture of the conversation, as a button that enlarges it (lightbox.js).
export function enlargeable(url, alt) {
  const image = element("img", { src: url, alt });
  return element("button", { type: "button", class: "picture", title: "Enlarge" }, image);
}

// Holds the place of a picture in a message, above its text; `add` inserts it.
class PicturePlace {
  #button = null;
  #add;

  constructor(add) {
    this.#add = add;
  }

  get button() {
    return this.#button;
  }

  show(url, alt) {
    show(() => {
      if (!this.#button) this.#add((this.#button = enlargeable(url, alt)));
      const image = this.#button.firstChild;
      [image.src, image.alt] = [url, alt];
    });
  }
}

export class Drawing {
  #text = bubble("assistant");
  #place = new PicturePlace((button) => this.#text.before(button));
  #began = performance.now();
  #prompt;

  constructor(prompt) {
    this.#prompt = prompt;
    this.#text.textContent = "Drawing…";
  }

  // Shows the events of a stream of api.js and returns the picture as a data URI. `onProgress` gets progress lines.
  // Throws ApiError.
  async run(events, onProgress) {
    let url = "";
    try {
      for await (const event of events) {
        if (event.type.endsWith(".progress")) onProgress(stepLine(event));
        else {
          url = `data:image/${event.output_format};base64,${event.b64_json}`;
          this.#place.show(url, `${this.#prompt} (in progress)`);
        }
      }
    } catch (error) {
      remove(this.#text);
      throw error;
    }
    onProgress(`picture in ${((performance.now() - this.#began) / 1000).toFixed(1)} s`);
    this.restore(url);
    return url;
  }

  // Shows the finished picture.
  restore(url) {
    this.#place.show(url, this.#prompt);
    this.#text.remove();
  }

  // Adds a button below the picture.
  addButton(label, work) {
    const button = element("button", { type: "button", class: "secondary" }, label);
    button.addEventListener("click", work);
    show(() => this.#place.button.after(button));
  }
}

// Shows the pictures that a model generates in a reply, above its text.
export class Drawings {
  #text;
  #places = [];
  pictures = []; // in the API's form

  constructor(text) {
    this.#text = text;
  }

  // Applies the pictures of a delta; returns a progress line if it has progress.
  apply({ images = [], partial_images: estimates = [], image_progress: progress }) {
    for (const estimate of estimates) this.#at(estimate.index).show(estimate.image_url.url, "Picture (in progress)");
    for (const image of images) {
      this.#at(image.index).show(image.image_url.url, image.revised_prompt ?? "Picture");
      this.pictures.push(image);
    }
    return progress && progress.step < progress.steps ? stepLine(progress) : "";
  }

  // Removes unfinished pictures.
  discardUnfinished() {
    for (const [index, place] of this.#places.entries()) {
      if (!this.pictures.some((image) => image.index === index)) place?.button?.remove();
    }
  }

  #at(index) {
    return (this.#places[index] ??= new PicturePlace((button) => this.#text.before(button)));
  }
}

function stepLine({ step, steps }) {
  return `step ${step} of ${steps}`;
}
