// Shows an image generation: its estimates, one after another, then the picture.

import { streamPicture } from "./api.js";
import { picture } from "./attachments.js";
import { bubble, remove, show } from "./bubbles.js";

const ESTIMATES = 3;

// Options for partial images and progress, for a direct request or a tool of the model.
export const STREAM_OPTIONS = { partial_images: ESTIMATES, progress: true };
export const TOOL = { type: "image_generation", ...STREAM_OPTIONS };

// Holds the place of a picture in a message, above its text; `add` inserts it.
class PicturePlace {
  #image = null;
  #add;

  constructor(add) {
    this.#add = add;
  }

  get image() {
    return this.#image;
  }

  show(url, alt) {
    show(() => {
      if (this.#image) this.#image.src = url;
      else this.#add((this.#image = picture(url, "")));
      this.#image.alt = alt;
    });
  }
}

export class Drawing {
  #text = bubble("assistant");
  #place = new PicturePlace((image) => this.#text.before(image));
  #began = performance.now();
  #prompt;

  constructor(prompt) {
    this.#prompt = prompt;
    this.#text.textContent = "Drawing…";
  }

  // Generates the picture and returns it as a data URI. `seed`: null for a random one. `onProgress` gets progress lines.
  // Throws ApiError.
  async run(model, key, seed, signal, onProgress) {
    const body = { model, prompt: this.#prompt, seed, ...STREAM_OPTIONS };
    try {
      for await (const event of streamPicture(body, key, signal)) {
        if (event.type.endsWith(".progress")) onProgress(stepLine(event));
        else this.#place.show(`data:image/${event.output_format};base64,${event.b64_json}`, `${this.#prompt} (in progress)`);
      }
    } catch (error) {
      remove(this.#text);
      throw error;
    }
    onProgress(`picture in ${((performance.now() - this.#began) / 1000).toFixed(1)} s`);
    show(() => this.#text.remove());
    this.#place.image.alt = this.#prompt;
    return this.#place.image.src;
  }

  // Adds a button below the picture.
  addButton(label, work) {
    const button = document.createElement("button");
    [button.type, button.className, button.textContent] = ["button", "secondary", label];
    button.addEventListener("click", work);
    show(() => this.#place.image.after(button));
  }
}

// Shows the pictures that a model generates in a reply, above the paragraph `text`.
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
      if (!this.pictures.some((image) => image.index === index)) place?.image?.remove();
    }
  }

  #at(index) {
    return (this.#places[index] ??= new PicturePlace((image) => this.#text.before(image)));
  }
}

function stepLine({ step, steps }) {
  return `step ${step} of ${steps}`;
}
