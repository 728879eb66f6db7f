"""Encode sound for language models that hear: Qwen2-Audio, Qwen's omni models, Granite Speech, GLM-ASR.

The checkpoint's own processor turns samples into inputs of the model, and its mark in a text into
placeholders. The model's own code then puts its vectors at these: its language model has no layers
here, and returns the embeddings that it is given.

Shapes: N samples, T tokens, X hidden size.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from motet_shared.errors import UnsupportedParameter

from .families import EncoderFamily, Prepared, downloaded

# Families whose processor drops what is longer than the tower's window.
_TRUNCATING = {"qwen2_audio", "qwen2_5_omni_thinker"}
_FRAMES_PER_PATCH = 2  # convolutions halve the frames of a spectrum before attention


class Sounds(EncoderFamily):
    """Encode recordings with a `ProcessorMixin` of transformers."""

    sense = "audio"

    def __init__(self, model: PreTrainedModel, processor: Any, tokenizer: Any):
        super().__init__(model, processor, tokenizer)
        self._names = inspect.signature(self.model.forward).parameters.keys()
        language_model = self.model.language_model
        language_model.set_input_embeddings(_NoEmbeddings(model))
        language_model.forward = _embeddings_given

    def warm_up(self) -> None:
        """Encode a second of silence."""
        rate = self.sampling_rate
        self.encode([self.prepare_sound(np.zeros(rate, np.float32), rate)])

    def prepare(self, picture: Image.Image, max_pixels: int) -> Prepared:
        """Refuse pictures. Raises UnsupportedParameter."""
        raise UnsupportedParameter(f"a {self.model.config.model_type} hears, it sees no pictures")

    @property
    def sampling_rate(self) -> int:
        """Return the samples per second that the processor takes."""
        return int(self._extractor.sampling_rate)

    @property
    def _extractor(self) -> Any:
        return getattr(self.processor, "feature_extractor", None) or self.processor.audio_processor

    def prepare_sound(self, samples: NDArray[np.float32], rate: int) -> Prepared:
        if rate != self.sampling_rate:
            raise ValueError(f"it takes {self.sampling_rate} samples per second, not {rate}")
        most = self._extractor.chunk_length if self.model.config.model_type in _TRUNCATING else None
        if most is not None and len(samples) > most * rate:
            raise ValueError(f"it hears at most {most} s, not {len(samples) / rate:.1f} s")
        processed = self._processed(samples)
        inputs = {name: value for name, value in processed.items() if name in self._names}
        ids = inputs.pop("input_ids")[0].tolist()
        inputs.pop("attention_mask", None)
        frames = max(inputs["input_features"].shape[1:])
        shapes = tuple((name, tuple(value.shape[1:])) for name, value in sorted(inputs.items()))
        return Prepared(inputs, frames // _FRAMES_PER_PATCH, shapes, ids)

    def _processed(self, samples: NDArray[np.float32]) -> dict[str, Tensor]:
        """Return the inputs of the model, "input_ids" of the recording's tokens among them."""
        return dict(
            self.processor(
                text=[self.processor.audio_token],
                audio=[samples],
                audio_kwargs={"sampling_rate": self.sampling_rate},
                add_special_tokens=False,
                return_tensors="pt",
            )
        )

    @torch.inference_mode()
    def encode(self, pictures: Sequence[Prepared]) -> list[Tensor]:
        names = pictures[0].inputs
        inputs: dict[str, Any] = self._joined({n: [p.inputs[n] for p in pictures] for n in names})
        counts = [picture.ids.count(self.placeholder) for picture in pictures]
        ids_1T = torch.full((1, sum(counts)), self.placeholder)
        inputs |= {"input_ids": ids_1T, "attention_mask": torch.ones_like(ids_1T)}
        output = self.model(**(self._moved(inputs) if self.on_gpu else inputs), use_cache=False)
        found_1TX = output.last_hidden_state.float()
        ends = accumulate(counts, initial=0)
        found = [found_1TX[:, start:end] for start, end in pairwise(ends)]
        return downloaded(found) if self.on_gpu else found


class _NoEmbeddings(nn.Module):
    """Return zeros for any token, in place of a table of embeddings that is not loaded."""

    def __init__(self, model: PreTrainedModel):
        super().__init__()
        self._hidden: int = model.config.get_text_config().hidden_size
        self.weight = nn.Parameter(torch.empty(0, dtype=model.dtype), requires_grad=False)

    def forward(self, ids: Tensor) -> Tensor:
        return ids.new_zeros(*ids.shape, self._hidden, dtype=self.weight.dtype)


def _embeddings_given(*, inputs_embeds: Tensor, **_: Any) -> MoeModelOutputWithPast:
    return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)
