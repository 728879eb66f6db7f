// A picture that forms: its estimates one after another in a message of the model, then the picture itself.

import { streamPicture } from "./api.js";
import { picture } from "./attachments.js";
import { bubble, remove, show } from "./bubbles.js";

const ESTIMATES = 3;

// What the server is to tell while a picture forms: given to it directly, or as a tool of the model.
export const FORMING = { partial_images: ESTIMATES, progress: true };
export const TOOL = { type: "image_generation", ...FORMING };

// The place of a picture in a message, above its words; `add` puts it there.
class Canvas {
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
  #canvas = new Canvas((image) => this.#text.before(image));
  #began = performance.now();
  #prompt;

  constructor(prompt) {
    this.#prompt = prompt;
    this.#text.textContent = "Drawing…";
  }

  // Draws it, with another `seed` each time if that is null; `told` is given each line about how far it is. The picture
  // as a data URI. ApiError if there is none.
  async run(model, key, seed, signal, told) {
    const body = { model, prompt: this.#prompt, seed, ...FORMING };
    try {
      for await (const event of streamPicture(body, key, signal)) {
        if (event.type.endsWith(".progress")) told(stepLine(event));
        else this.#canvas.show(`data:image/${event.output_format};base64,${event.b64_json}`, `${this.#prompt} (forming)`);
      }
    } catch (error) {
      remove(this.#text);
      throw error;
    }
    told(`picture in ${((performance.now() - this.#began) / 1000).toFixed(1)} s`);
    show(() => this.#text.remove());
    this.#canvas.image.alt = this.#prompt;
    return this.#canvas.image.src;
  }

  // A button below the picture.
  offer(label, work) {
    const button = document.createElement("button");
    [button.type, button.className, button.textContent] = ["button", "quiet", label];
    button.addEventListener("click", work);
    show(() => this.#canvas.image.after(button));
  }
}

// The pictures that a model draws in a reply, in the message whose words are `text`.
export class Drawings {
  #text;
  #canvases = [];
  done = []; // as the API tells and takes them

  constructor(text) {
    this.#text = text;
  }

  // What a delta of the reply says of pictures; a line about how far one is, if it says that.
  saw({ images = [], partial_images: estimates = [], image_progress: progress }) {
    for (const estimate of estimates) this.#at(estimate.index).show(estimate.image_url.url, "Picture (forming)");
    for (const image of images) {
      this.#at(image.index).show(image.image_url.url, image.revised_prompt ?? "Picture");
      this.done.push(image);
    }
    return progress && progress.step < progress.steps ? stepLine(progress) : "";
  }

  // Those that were not finished go.
  end() {
    for (const [index, canvas] of this.#canvases.entries()) {
      if (!this.done.some((image) => image.index === index)) canvas?.image?.remove();
    }
  }

  #at(index) {
    return (this.#canvases[index] ??= new Canvas((image) => this.#text.before(image)));
  }
}

function stepLine({ step, steps }) {
  return `step ${step} of ${steps}`;
}
