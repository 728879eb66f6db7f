"""Encode pictures and sound for thinkers of omni models, which have a tower for either."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.nn import functional
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
        deeper = getattr(model.config.vision_config, "deepstack_visual_indexes", None) or ()
        self._deeper = len(deeper)

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
        """Encode a batch, which has either pictures or recordings.

        Deeper layers, which pictures alone have (Qwen3-Omni), are zeros of a recording.
        """
        if "input_features" not in pictures[0].inputs:
            return self._pictures.encode(pictures)
        found = self._sounds.encode(pictures)
        return [functional.pad(one_LTX, (0, 0, 0, 0, 0, self._deeper)) for one_LTX in found]
