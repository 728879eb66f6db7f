"""Encode texts and pictures as vectors that compare with each other: CLIP and SigLIP.

B texts or pictures · V numbers of a vector · H, W size of a picture.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from torch.nn import functional
from transformers import AutoImageProcessor, AutoModel, PreTrainedModel

from motet_kernels.runtime.device import describe, dtype_name
from motet_shared.errors import ConfigError

from .backbone import UNUSABLE, load_model
from .config import EngineConfig
from .encoder import prepare
from .folder import Folder
from .packed import padded
from .texts import Picture, Text, read_tokenizer, special_tokens

_FAMILIES = ("clip", "siglip")  # SigLIP 2 of fixed size is `siglip`, too


class PictureEncoder:
    """Compute vectors of texts and of pictures with the two towers of one model."""

    packed = False

    def __init__(
        self, model: PreTrainedModel, processor: Any, folder: Folder, config: EngineConfig
    ):
        self._model, self._processor = model, processor
        self.folder = folder
        text, vision = model.config.text_config, model.config.vision_config
        self.limit = min([text.max_position_embeddings, *folder.limits])
        self.limit = min(self.limit, config.max_length or self.limit)
        self.vocabulary: int = text.vocab_size
        # SigLIP reads the last token of a text that is always padded to the same length.
        self._fixed = text.max_position_embeddings if model.config.model_type == "siglip" else 0
        self._padding = _padding(folder, text)
        self._tokens = (vision.image_size // vision.patch_size) ** 2 + (not self._fixed)
        self._normalize = {"auto": folder.normalized is not False, "always": True, "never": False}[
            config.normalize
        ]
        self.size = self.encode([Text([0])]).shape[1]

    @classmethod
    def load(cls, folder: Folder, config: EngineConfig) -> PictureEncoder:
        """Load a checkpoint: safetensors only, no code from the folder. Raises ConfigError."""
        device = prepare(folder, config)
        model = load_model(AutoModel, folder.transformer, config.dtype, device)
        if model.config.model_type not in _FAMILIES:
            raise ConfigError(
                f"model={config.model!r}: {model.config.model_type!r} embeds texts and pictures in a "
                f"way that is not supported; there are {', '.join(_FAMILIES)}"
            )
        try:
            processor = AutoImageProcessor.from_pretrained(
                folder.transformer, local_files_only=True, trust_remote_code=False, backend="pil"
            )
        except UNUSABLE as error:
            first = str(error).strip().split("\n")[0]
            raise ConfigError(
                f"model={config.model!r}: preprocessor_config.json cannot be read: {first}"
            ) from error
        return cls(model, processor, folder, config)

    def describe(self) -> dict[str, str]:
        """Return what was chosen when the model was loaded."""
        return {"dtype": dtype_name(self._model.dtype), **describe(self._model.device)}

    def prepare(self, picture: Image) -> Picture:
        """Return a decoded picture in the model's size. Needs no engine; thread-safe.

        Raises ValueError for one that the model's processor cannot scale.
        """
        pixels: Tensor = self._processor(images=picture, return_tensors="pt")["pixel_values"][0]
        return Picture(pixels, self._tokens)

    @torch.inference_mode()
    def encode(self, given: Sequence[Text | Picture]) -> Tensor:
        """Return `[B, V]` float32 on the model's device: a pass of each tower that is needed."""
        texts = iter(self._encoded([one for one in given if isinstance(one, Text)], self._texts))
        seen = [one for one in given if isinstance(one, Picture)]
        pictures = iter(self._encoded(seen, self._pictures))
        rows = [next(texts if isinstance(one, Text) else pictures) for one in given]
        vectors_BV = torch.stack(rows).float()
        return functional.normalize(vectors_BV) if self._normalize else vectors_BV

    @staticmethod
    def _encoded(given: list[Any], encode: Callable[[list[Any]], Tensor]) -> Sequence[Tensor]:
        return list(encode(given)) if given else []

    def _texts(self, texts: list[Text]) -> Tensor:
        ids = [text.ids for text in texts]
        if self._fixed:
            ids = [[*row, *[self._padding] * (self._fixed - len(row))] for row in ids]
        batch = padded(ids, self._padding, None, (), self._model.device)
        if self._fixed:
            del batch["attention_mask"]  # padding is read, too
        model: Any = self._model
        found: Tensor = model.get_text_features(**batch).pooler_output
        return found

    def _pictures(self, pictures: list[Picture]) -> Tensor:
        pixels_BCHW = torch.stack([one.pixels for one in pictures])
        model: Any = self._model
        there = pixels_BCHW.to(self._model.device, self._model.dtype)
        found: Tensor = model.get_image_features(pixel_values=there).pooler_output
        return found


def _padding(folder: Folder, config: Any) -> int:
    name = special_tokens(folder.transformer).get("pad_token", "")
    found = read_tokenizer(folder.transformer).token_to_id(name)
    return int(found if found is not None else config.pad_token_id or 0)
