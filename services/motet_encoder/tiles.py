"""Encode pictures as tiles of one size plus the whole picture: SmolVLM and Idefics3."""

from __future__ import annotations

import math
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from .families import EncoderFamily, Prepared


class Tiles(EncoderFamily):
    """Encode with equally many tokens per tile; `max_pixels` bounds tiles, down to the whole."""

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        config = model.config
        self._tile: int = processor.max_image_size["longest_edge"]
        self._longest: int = processor.size["longest_edge"]
        self._patches = (config.vision_config.image_size // config.vision_config.patch_size) ** 2
        self._tokens = self._patches // config.scale_factor**2
        self._around = str(getattr(tokenizer, "fake_image_token", "<fake_token_around_image>"))
        self._whole = str(getattr(tokenizer, "global_image_token", "<global-img>"))
        self._image = tokenizer.convert_ids_to_tokens(self.placeholder)

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        processed = self.processor(
            images=[picture],
            return_row_col_info=True,
            return_tensors="pt",
            **self._size(max_pixels),
        )
        inputs = {name: processed[name] for name in ("pixel_values", "pixel_attention_mask")}
        _, tiles, _, height, width = inputs["pixel_values"].shape
        text = self._text(processed["rows"][0][0], processed["cols"][0][0])
        # The tokenizer's own `encode` changes state that all threads share.
        ids = list(self.tokenizer.backend_tokenizer.encode(text, add_special_tokens=False).ids)
        return Prepared(inputs, tiles * self._patches, (height, width), ids)

    def _size(self, max_pixels: int) -> dict[str, Any]:
        """Return processor settings: as many tiles along the longer side as `max_pixels` allows."""
        if not max_pixels:
            return {}
        tiles_along = math.isqrt(max_pixels) // self._tile
        if tiles_along <= 1:
            return {"do_image_splitting": False}
        return {"size": {"longest_edge": min(tiles_along * self._tile, self._longest)}}

    def _text(self, rows: int, columns: int) -> str:
        """Return the prompt text of a picture, as in transformers' processors of these families."""
        overview: str = self._around + self._whole + self._image * self._tokens + self._around
        if not rows:
            return overview
        lines = (
            "".join(
                f"{self._around}<row_{row}_col_{column}>" + self._image * self._tokens
                for column in range(1, columns + 1)
            )
            for row in range(1, rows + 1)
        )
        return "".join(f"{line}\n" for line in lines) + "\n" + overview

    def _joined(self, inputs: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        """Pad pictures to equal numbers of tiles by empty ones, which transformers drops."""
        max_tiles = max(part.shape[1] for part in inputs["pixel_values"])
        padded = {
            name: [_padded(part, max_tiles) for part in parts] for name, parts in inputs.items()
        }
        return super()._joined(padded)


def _padded(part: Tensor, tiles: int) -> Tensor:
    return torch.cat(
        (part, part.new_zeros(part.shape[0], tiles - part.shape[1], *part.shape[2:])), dim=1
    )
