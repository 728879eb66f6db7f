"""Load a pocket-tts folder as one module: `config.json` and `model.safetensors`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import DynamicCache

from .codec import SpeechCodec
from .config import PocketConfig
from .errors import PocketError
from .frame_generator import FrameGenerator, Pointer
from .phonemizer import PhonemeSequence, Phonemizer


class SpokenFrame(NamedTuple):
    """Hold one frame's samples, and the characters of the text whose phonemes began with it."""

    samples: Tensor
    began: list[int]


class PocketSpeech(nn.Module):
    """Combine phonemizer, frame generator and codec.

    `stream` speaks one sentence; an engine that speaks many uses the parts.
    """

    def __init__(self, config: PocketConfig) -> None:
        super().__init__()
        self.config = config
        self.reader, self.speaker, self.codec = (
            Phonemizer(config),
            FrameGenerator(config),
            SpeechCodec(config),
        )

    @classmethod
    def load(cls, folder: Path, dtype: torch.dtype = torch.float32) -> PocketSpeech:
        """Load a checkpoint for inference. Raises ValueError if it is of another model."""
        model = cls(PocketConfig.load(folder))
        model.load_state_dict(load_file(folder / "model.safetensors"))
        return model.to(dtype).eval()

    def save(self, folder: Path, dtype: torch.dtype = torch.float16) -> None:
        """Write config and weights to a folder."""
        folder.mkdir(parents=True, exist_ok=True)
        self.config.save(folder)
        weights = {name: value.to(dtype).contiguous() for name, value in self.state_dict().items()}
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "model.safetensors").chmod(0o644)

    def voice(self, name: str) -> int:
        """Return the number of a voice. Raises PocketError if it is unknown."""
        if name not in self.config.voices:
            raise PocketError(
                f"voice={name!r} is unknown: use one of {', '.join(self.config.voices)}",
                param="voice",
            )
        return self.config.voices.index(name)

    def read(self, text: str, voice: str) -> PhonemeSequence:
        """Return the phonemes of a text and the characters that they come from."""
        return self.reader.read(text, self.voice(voice))

    @torch.inference_mode()
    def stream(
        self, text: str, voice: str, *, rate: float = 1.0, seed: int = 0
    ) -> Iterator[SpokenFrame]:
        """Speak one sentence, frame by frame."""
        reading = self.read(text, voice)
        pointer, state, cache = Pointer(reading.phonemes), self.codec.begin(seed), DynamicCache()
        if pointer.done:
            return
        inputs, begun = self.speaker.prompt(reading.phonemes, self.voice(voice), rate)[None], 0
        while not pointer.done:
            output = self.speaker.backbone(
                inputs_embeds=inputs, past_key_values=cache, use_cache=True
            )
            before = pointer.place
            frames = self.speaker.draw(output.last_hidden_state[:, -1], [pointer])
            now = max(before + 1, pointer.place)  # phonemes passed within a frame began with it
            codes = frames[:, None, : self.config.codebooks]
            yield SpokenFrame(self.codec.decode([state], codes)[0], reading.characters[begun:now])
            begun, inputs = max(begun, now), self.speaker.embed(frames)[:, None]
