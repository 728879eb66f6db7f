// Pictures that go with the next message: chosen, pasted or dropped, shown small, and sent as data URIs.

const $ = (id) => document.getElementById(id);
const SIDE = 1536; // px: larger pictures are sent smaller, no model here sees more

export class Attachments {
  #urls = [];
  #problem; // shows one
  #allowed = false;

  constructor(problem) {
    this.#problem = problem;
    const picker = $("picture-file");
    $("attach").addEventListener("click", () => picker.click());
    picker.addEventListener("change", () => {
      this.#read(picker.files);
      picker.value = "";
    });
    document.addEventListener("paste", (event) => this.#offered(event, event.clipboardData));
    document.addEventListener("drop", (event) => this.#offered(event, event.dataTransfer));
    for (const kind of ["dragover", "dragleave", "drop"]) {
      document.addEventListener(kind, (event) => this.#dragged(event, kind === "dragover"));
    }
  }

  // Whether the model reads pictures.
  allow(allowed) {
    this.#allowed = allowed;
    $("attach").hidden = !allowed;
    if (!allowed) this.put([]);
  }

  get allowed() {
    return this.#allowed;
  }

  get any() {
    return this.#urls.length > 0;
  }

  // The pictures, which are no longer attached then.
  take() {
    const urls = this.#urls;
    this.put([]);
    return urls;
  }

  put(urls) {
    this.#urls = urls;
    $("attachments").replaceChildren(...urls.map((url, index) => this.#thumbnail(url, index)));
    $("attachments").hidden = !urls.length;
  }

  add(url) {
    this.put([...this.#urls, url]);
  }

  #thumbnail(url, index) {
    const button = document.createElement("button");
    button.type = "button";
    button.className = "thumbnail";
    button.title = "Take this picture away";
    button.append(picture(url, `Picture ${index + 1}, take it away`));
    button.addEventListener("click", () => this.put(this.#urls.filter((_, other) => other !== index)));
    return button;
  }

  #dragged(event, over) {
    const files = event.dataTransfer?.types.includes("Files");
    if (files) event.preventDefault(); // or the browser leaves the page for the file
    document.body.classList.toggle("dropping", Boolean(over && files && this.#allowed));
  }

  #offered(event, data) {
    if (!data?.files.length) return;
    event.preventDefault();
    this.#read(data.files);
  }

  async #read(files) {
    if (!this.#allowed) return this.#problem("This model reads no pictures: choose another one.");
    for (const file of [...files]) {
      try {
        this.add(await shrunk(file));
      } catch {
        this.#problem(`${file.name} is no picture that this browser can read.`);
      }
    }
  }
}

export function picture(url, alt) {
  const image = document.createElement("img");
  [image.src, image.alt] = [url, alt];
  return image;
}

// The file as a data URI: itself where it is small, else drawn smaller.
async function shrunk(file) {
  const bitmap = await createImageBitmap(file);
  const scale = Math.min(1, SIDE / Math.max(bitmap.width, bitmap.height));
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
