"""Encode pictures in their own resolution, with a break token behind each row: Pixtral, Mistral 3.

transformers' processor for it needs torchvision; its image processor does not.
"""

from __future__ import annotations

from typing import Any

from PIL import Image
from transformers import PreTrainedModel

from .families import Prepared
from .processed import Processed, scaled_down

_BREAK, _END = "[IMG_BREAK]", "[IMG_END]"


class Pixtral(Processed):
    """Encode with a token per square of merged patches. The processor is the image processor."""

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        self._square = self._patch * model.config.spatial_merge_size
        self._break, self._end = tokenizer.convert_tokens_to_ids([_BREAK, _END])

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        processed = self.processor(
            [scaled_down(picture, max_pixels)], patch_size=self._square, return_tensors="pt"
        )
        inputs = {name: processed[name] for name in ("pixel_values", "image_sizes")}
        height, width = inputs["image_sizes"][0].tolist()
        rows, columns = height // self._square, width // self._square
        ids = ([self.placeholder] * columns + [self._break]) * rows
        patches = height * width // self._patch**2
        return Prepared(inputs, patches, (height, width), [*ids[:-1], self._end])
