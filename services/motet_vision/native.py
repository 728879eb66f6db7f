"""Qwen2.5-VL and Qwen3-VL: pictures in their own resolution, as many tokens as they have patches."""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import PreTrainedModel

from .families import Family, Prepared


class Native(Family):
    """A token for every square of merged patches; Qwen3-VL gives embeddings for deeper layers besides."""

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        self._merge: int = processor.merge_size
        self._least, self._most = int(processor.size["shortest_edge"]), int(processor.size["longest_edge"])

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        most = max(self._least, min(max_pixels or self._most, self._most))
        size = {"shortest_edge": self._least, "longest_edge": most}
        made = self.processor(images=[picture], size=size, return_tensors="pt")
        frames, rows, columns = made["image_grid_thw"][0].tolist()
        grid = (frames, rows // self._merge, columns // self._merge)
        inputs = {name: made[name] for name in ("pixel_values", "image_grid_thw")}
        ids = [self.placeholder] * (grid[0] * grid[1] * grid[2])
        return Prepared(inputs, frames * rows * columns, "any size", ids, grid)
