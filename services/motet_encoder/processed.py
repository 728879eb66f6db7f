"""Encode pictures as the checkpoint's own processor prepares them: most families need no more.

The processor of transformers turns a picture into inputs of the model, and its mark in a text into
the tokens that stand for the picture. `get_image_features` computes as many vectors as there are
placeholders among these tokens, in their order.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from motet_shared.errors import UnsupportedParameter

from .families import EncoderFamily, Prepared, downloaded
from .video import Video

_PATCH = 14  # pixels of a side, where the config of a tower names none


class Processed(EncoderFamily):
    """Encode with a `ProcessorMixin` of transformers.

    Pictures larger than `max_pixels` are scaled down before the processor sees them.
    """

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        self._names = inspect.signature(self.model.get_image_features).parameters.keys()
        patch = getattr(model.config.vision_config, "patch_size", None)
        self._patch = patch if isinstance(patch, int) else _PATCH

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        processed = dict(
            self.processor(
                images=[scaled_down(picture, max_pixels)],
                text=[self.processor.image_token],
                add_special_tokens=False,
                return_tensors="pt",
            )
        )
        inputs = {name: value for name, value in processed.items() if name in self._names}
        pixels = inputs["pixel_values"]
        patches = max(pixels.numel() // (3 * self._patch**2), 1)
        ids = processed["input_ids"][0].tolist()
        return Prepared(inputs, patches, _shapes(inputs), ids, self._grid(inputs))

    def prepare_video(self, video: Video, max_pixels: int) -> Prepared:
        """Prepare a video as its frames. Raises UnsupportedParameter if these have positions."""
        prepared = super().prepare_video(video, max_pixels)
        if "image_grid_thw" in prepared.inputs:
            message = f"a {self.model.config.model_type} reads no videos; send frames as images"
            raise UnsupportedParameter(message)
        return prepared

    def _grid(self, inputs: dict[str, Tensor]) -> tuple[int, ...]:
        """Return frames, rows and columns of tokens; () if there is no `image_grid_thw`."""
        if "image_grid_thw" not in inputs:
            return ()
        merge = self.processor.image_processor.merge_size
        frames, rows, columns = inputs["image_grid_thw"][0].tolist()
        return (frames, rows // merge, columns // merge)

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Prepared]) -> list[Tensor]:
        names = pictures[0].inputs
        inputs = self._joined({n: [p.inputs[n] for p in pictures] for n in names})
        output = self.model.get_image_features(**(self._moved(inputs) if self.on_gpu else inputs))
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        found_LTX = torch.stack([_tokens(layer) for layer in layers]).float()
        counts = [picture.ids.count(self.placeholder) for picture in pictures]
        ends = list(accumulate(counts, initial=0))
        if ends[-1] != found_LTX.shape[1]:
            raise ValueError(
                f"the model made {found_LTX.shape[1]} embeddings for {ends[-1]} placeholders"
            )
        found = [found_LTX[:, start:end] for start, end in pairwise(ends)]
        return downloaded(found) if self.on_gpu else found


def scaled_down(picture: Image.Image, max_pixels: int) -> Image.Image:
    """Return a picture of at most about `max_pixels`, in its proportions; 0: any number."""
    pixels = picture.width * picture.height
    if not max_pixels or pixels <= max_pixels:
        return picture
    scale = math.sqrt(max_pixels / pixels)
    size = max(round(picture.width * scale), 1), max(round(picture.height * scale), 1)
    return picture.resize(size, Image.Resampling.BICUBIC)


def _tokens(layer: Tensor | Sequence[Tensor]) -> Tensor:
    """Return one layer's features `[T, X]` of all pictures, which may be apart or padded."""
    parts = [layer] if isinstance(layer, Tensor) else layer
    return torch.cat([part.reshape(-1, part.shape[-1]) for part in parts])


def _shapes(inputs: dict[str, Tensor]) -> tuple[tuple[str, tuple[int, ...]], ...]:
    """Return the shapes by which pictures can be joined along the first axis."""
    return tuple((name, tuple(value.shape[1:])) for name, value in sorted(inputs.items()))
