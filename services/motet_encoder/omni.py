"""Encode pictures and sound for thinkers of omni models, which have a tower for either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from .families import EncoderFamily, Prepared
from .native import NativeResolution
from .sounds import Sounds
from .video import Video


class Omni(EncoderFamily):
    """Encode pictures in their own resolution, and recordings by the checkpoint's processor."""

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        self._pictures = NativeResolution(model, processor.image_processor, tokenizer)
        self._sounds = Sounds(model, processor, tokenizer)

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        return self._pictures.prepare(picture, max_pixels)

    def prepare_video(self, video: Video, max_pixels: int) -> Prepared:
        return self._pictures.prepare_video(video, max_pixels)

    def prepare_sound(self, samples: NDArray[np.float32], rate: int) -> Prepared:
        return self._sounds.prepare_sound(samples, rate)

    def warm_up(self) -> None:
        """Encode a picture and a second of silence."""
        self._pictures.warm_up()
        self._sounds.warm_up()

    def encode(self, pictures: Sequence[Prepared]) -> list[Tensor]:
        """Encode a batch, which has either pictures or recordings."""
        is_sound = "input_features" in pictures[0].inputs
        return (self._sounds if is_sound else self._pictures).encode(pictures)
