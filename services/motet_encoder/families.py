"""Define how model families encode a picture: preparation, number of tokens, and batches.

Preparing and encoding are transformers' own code: its image processors, and `get_image_features` of
its models. This module decides what is batched, and splits the results by picture. Shapes: L
layers, T tokens, X hidden size.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from transformers import PreTrainedModel

from motet_kernels import gpu
from motet_kernels.runtime.device import Download, describe, dtype_name
from motet_kernels.spans import upload
from motet_models.image_support import Sense, placeholders
from motet_shared.errors import ConfigError, UnsupportedParameter

from .video import Video


@dataclass(frozen=True, slots=True, eq=False)
class Prepared:
    """Hold a picture that is ready to be encoded.

    * inputs: inputs of the model, the pictures of a batch along the first axis.
    * patches: number of patches for the tower, which determine the cost.
    * batch_key: pictures with equal values can be encoded together.
    * ids: token ids that represent it in a prompt, placeholders among them.
    * grid: (frames, rows, columns) of its tokens, where the language model's positions have these
      axes.
    * interval: from one of these frames to the next, in positions.
    * parts: number of pictures it counts as: frames of a video, for models without videos.
    """

    inputs: dict[str, Tensor]
    patches: int
    batch_key: Hashable
    ids: list[int]
    grid: tuple[int, ...] = ()
    interval: float = 1.0
    parts: int = 1


class EncoderFamily(ABC):
    """Encode pictures or sound with the towers of one checkpoint.

    placeholder: the token that embeddings replace, where `sense` is the one that it encodes.
    """

    sense: Sense = "image"

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        self.model: Any = model
        self.processor = processor
        self.tokenizer = tokenizer
        self.placeholders = placeholders(model.config.to_dict())
        if self.sense not in self.placeholders:
            raise ConfigError(f"a {model.config.model_type} without a placeholder in its config")
        self.placeholder = self.placeholders[self.sense]
        self.device, self.dtype = model.device, model.dtype
        self.on_gpu = gpu.is_gpu(self.device)

    def describe(self) -> dict[str, str]:
        """Return the choices made when the model was loaded."""
        return {"dtype": dtype_name(self.dtype), **describe(self.device)}

    @abstractmethod
    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        """Prepare an RGB picture, scaled down to about `max_pixels` if that is not 0.

        May be called on any thread. Raises ValueError for a picture that the model cannot encode.
        """

    def prepare_video(self, video: Video, max_pixels: int) -> Prepared:
        """Prepare a video as its frames, in order, each as a picture. Raises like `prepare`."""
        frames = [self.prepare(frame, max_pixels) for frame in video.frames]
        inputs = self._joined(
            {name: [frame.inputs[name] for frame in frames] for name in frames[0].inputs}
        )
        ids = [token for frame in frames for token in frame.ids]
        patches = sum(frame.patches for frame in frames)
        return Prepared(inputs, patches, frames[0].batch_key, ids, parts=len(frames))

    def prepare_sound(self, samples: NDArray[np.float32], rate: int) -> Prepared:
        """Prepare a recording of one channel. Raises UnsupportedParameter if the model is deaf."""
        raise UnsupportedParameter(f"a {self.model.config.model_type} hears no sound")

    def warm_up(self) -> None:
        """Encode something small, so that the first request does not wait for what that loads."""
        self.encode([self.prepare(Image.new("RGB", (64, 64)), 0)])

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Prepared]) -> list[Tensor]:
        """Return float32 embeddings `[L, T, X]` of each picture, on the CPU.

        All pictures have one `batch_key`.
        """
        names = pictures[0].inputs
        inputs = self._joined({n: [p.inputs[n] for p in pictures] for n in names})
        output = self.model.get_image_features(**(self._moved(inputs) if self.on_gpu else inputs))
        layers = [output.pooler_output, *(getattr(output, "deepstack_features", None) or ())]
        ends = list(accumulate((picture.parts for picture in pictures), initial=0))
        found = [
            torch.stack([torch.cat(list(layer[start:end])) for layer in layers]).float()
            for start, end in pairwise(ends)
        ]
        return downloaded(found) if self.on_gpu else found

    def _joined(self, inputs: dict[str, list[Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat(parts) for name, parts in inputs.items()}

    def _moved(self, inputs: dict[str, Tensor]) -> dict[str, Any]:
        """Return the inputs on the GPU, with pixels in the dtype of the model."""
        return {name: self._uploaded(part) for name, part in inputs.items()}

    def _uploaded(self, part: Tensor) -> Tensor:
        return upload(part.to(self.dtype) if part.is_floating_point() else part, self.device)


def downloaded(found: list[Tensor]) -> list[Tensor]:
    """Return the tensors on the CPU, by one copy."""
    return list(
        Download(torch.cat(found, dim=1)).wait().split([len(one[0]) for one in found], dim=1)
    )


class FixedResolution(EncoderFamily):
    """Encode LLaVA's pictures, all scaled to the one resolution of the tower.

    `max_pixels` is ignored. If the processor crops a square from the middle (CLIP), the rest is not
    encoded.
    """

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        config = model.config
        # CLIP's towers begin with a token for the whole picture; the "default" strategy drops it.
        embeddings = getattr(self.model.vision_tower, "embeddings", None)
        self._extra = int(hasattr(embeddings, "class_embedding"))
        self._left_out = int(config.vision_feature_select_strategy == "default")
        self._patch: int = config.vision_config.patch_size

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        pixels = self.processor(images=[picture], return_tensors="pt")["pixel_values"]
        height, width = pixels.shape[-2:]
        patches = (height // self._patch) * (width // self._patch)
        ids = [self.placeholder] * (patches + self._extra - self._left_out)
        return Prepared({"pixel_values": pixels}, patches, (height, width), ids)
