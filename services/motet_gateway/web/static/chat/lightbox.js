// Enlarges a picture of the conversation, with download and, where the server draws, an edit of the part that is painted over.

import { MaskEditor } from "./mask-editor.js";
import { blobOf } from "../common/data-uri.js";
import { download } from "../conversations/export.js";

const $ = (id) => document.getElementById(id);

export class Lightbox {
  #editor = new MaskEditor($("lightbox-mask"), $("lightbox-picture"));
  #canEdit;
  #edit;

  // `canEdit`: returns whether the server edits pictures; `edit`: gets {source, mask, prompt}, with pictures as data URIs.
  constructor(canEdit, edit) {
    [this.#canEdit, this.#edit] = [canEdit, edit];
    document.addEventListener("click", (event) => {
      const image = event.target.closest("button.picture")?.querySelector("img");
      if (image) this.#open(image);
    });
    $("lightbox-close").addEventListener("click", () => $("lightbox").close());
    $("lightbox-download").addEventListener("click", () => this.#download());
    $("lightbox-edit").addEventListener("click", () => this.#showEditor($("lightbox-editor").hidden));
    $("lightbox-clear").addEventListener("click", () => this.#editor.clear());
    $("lightbox-brush").addEventListener("input", () => (this.#editor.brush = Number($("lightbox-brush").value)));
    $("lightbox-editor").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#submit();
    });
  }

  #open(image) {
    [$("lightbox-picture").src, $("lightbox-picture").alt] = [image.src, image.alt];
    $("lightbox-edit").hidden = !this.#canEdit();
    $("lightbox-prompt").value = "";
    this.#showEditor(false);
    $("lightbox").showModal();
  }

  #showEditor(shown) {
    $("lightbox-editor").hidden = !shown;
    $("lightbox-edit").setAttribute("aria-expanded", String(shown));
    this.#editor.show(shown);
    if (shown) $("lightbox-prompt").focus();
  }

  #download() {
    const blob = blobOf($("lightbox-picture").src);
    download(`picture.${blob.type.split("/")[1].replace("jpeg", "jpg")}`, blob, blob.type);
  }

  #submit() {
    const prompt = $("lightbox-prompt").value.trim();
    if (!prompt) return $("lightbox-prompt").focus();
    const edit = { source: $("lightbox-picture").src, mask: this.#editor.mask(), prompt };
    $("lightbox").close();
    this.#edit(edit);
  }
}
