// Attaches chosen, pasted or dropped pictures to the next message, as data URIs.

const $ = (id) => document.getElementById(id);
const MAX_SIDE = 1536; // px; larger pictures are downscaled, since models use no more

export class Attachments {
  #urls = [];
  #problem; // shows an error message
  #enabled = false;

  constructor(problem) {
    this.#problem = problem;
    const picker = $("picture-file");
    $("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.#read(picker.files);
      picker.value = "";
    });
    document.addEventListener("paste", (event) => this.#receive(event, event.clipboardData));
    document.addEventListener("drop", (event) => this.#receive(event, event.dataTransfer));
    for (const kind of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => this.#dragged(event, kind === "dragover"));
    }
  }

  // Enables attachments if the model accepts pictures.
  enable(enabled) {
    this.#enabled = enabled;
    $("attach").hidden = !enabled;
    if (!enabled) this.set([]);
  }

  get enabled() {
    return this.#enabled;
  }

  get hasPictures() {
    return this.#urls.length > 0;
  }

  // Returns the pictures and detaches them.
  takeAll() {
    const urls = this.#urls;
    this.set([]);
    return urls;
  }

  set(urls) {
    this.#urls = urls;
    $("attachments").replaceChildren(...urls.map((url, index) => this.#thumbnail(url, index)));
    $("attachments").hidden = !urls.length;
  }

  add(url) {
    this.set([...this.#urls, url]);
  }

  #thumbnail(url, index) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "thumbnail";
    button.title = "Remove this picture";
    button.append(picture(url, `Picture ${index + 1}, remove`));
    button.addEventListener("click", () => this.set(this.#urls.filter((_, other) => other !== index)));
    return button;
  }

  #dragged(event, over) {
    const files = event.dataTransfer?.types.includes("Files");
    if (files) event.preventDefault(); // else the browser opens the file instead of the page
    document.body.classList.toggle("dropping", Boolean(over && files && this.#enabled));
  }

  #receive(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.#read(data.files);
  }

  async #read(files) {
    if (!this.#enabled) return this.#problem("This model does not accept pictures: choose another one.");
    for (const file of [...files]) {
      try {
        this.add(await downscaled(file));
      } catch {
        this.#problem(`${file.name} is not a picture that this browser can read.`);
      }
    }
  }
}

export function picture(url, alt) {
  const image = document.createElement("img");
  [image.src, image.alt] = [url, alt];
  return image;
}

// Returns the file as a data URI, downscaled if it is large.
async function downscaled(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, MAX_SIDE / Math.max(bitmap.width, bitmap.height));
  if (scale === 1 && file.size < 1 << 20) return await dataUri(file);
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [Math.round(bitmap.width * scale), Math.round(bitmap.height * scale)];
  canvas.getContext("2d").drawImage(bitmap, 0, 0, canvas.width, canvas.height);
  return canvas.toDataURL("image/jpeg", 0.9);
}

function dataUri(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}
