// Paints the part of a picture that an edit may change, on a canvas that lies over the picture.

const PAINT = "#e0115f"; // the style sheet makes the canvas translucent

export class MaskEditor {
  brush = 40; // px of the picture
  #canvas;
  #image;
  #painted = false;
  #last = null; // {x, y} of the stroke

  constructor(canvas, image) {
    [this.#canvas, this.#image] = [canvas, image];
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      this.#stroke(event);
    });
    canvas.addEventListener("pointermove", (event) => event.buttons && this.#stroke(event));
    canvas.addEventListener("pointerup", () => (this.#last = null));
  }

  show(shown) {
    this.#canvas.hidden = !shown;
    this.clear();
  }

  clear() {
    const { naturalWidth, naturalHeight } = this.#image;
    [this.#canvas.width, this.#canvas.height] = [naturalWidth, naturalHeight];
    [this.#painted, this.#last] = [false, null];
  }

  // Returns the mask as a data URI: transparent where the picture may change. Null if nothing is painted.
  mask() {
    if (!this.#painted) return null;
    const { width, height } = this.#canvas;
    const mask = Object.assign(document.createElement("canvas"), { width, height });
    const pen = mask.getContext("2d");
    pen.fillRect(0, 0, width, height);
    pen.globalCompositeOperation = "destination-out";
    pen.drawImage(this.#canvas, 0, 0);
    return mask.toDataURL("image/png");
  }

  #stroke({ offsetX, offsetY }) {
    const scale = this.#canvas.width / this.#canvas.clientWidth;
    const to = { x: offsetX * scale, y: offsetY * scale };
    const from = this.#last ?? to;
    const pen = this.#canvas.getContext("2d");
    Object.assign(pen, { strokeStyle: PAINT, lineWidth: this.brush * Math.max(1, scale), lineCap: "round" });
    pen.beginPath();
    pen.moveTo(from.x, from.y);
    pen.lineTo(to.x, to.y);
    pen.stroke();
    [this.#last, this.#painted] = [to, true];
  }
}
