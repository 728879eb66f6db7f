"""Run Nemotron's streaming transducers: each chunk of a live stream is encoded once.

Recordings are encoded window by window with the longest lookahead, live streams chunk by chunk with
one whose words come at most `DELAY` behind the voice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.models.nemotron3_5_asr.processing_nemotron3_5_asr import DEFAULT_PROMPT_DICTIONARY

from motet_asr.config import EngineConfig
from motet_asr.engine.audio_stream import AudioStream, StreamChunk
from motet_asr.engine.engine import SAMPLE_RATE, Audio, WaitingWindow
from motet_asr.engine.request import WindowResult
from motet_asr.engine.transducer_engine import TransducerState
from motet_kernels.spans import upload
from motet_shared.errors import ConfigError

from .timed_tokens import WordBuilder
from .transducer import Transducer

DELAY = 0.3  # seconds
_LOOKAHEADS = (13, 6, 1, 0)  # of the released checkpoints, in encoder frames
_TAG = re.compile(r"<([a-z]{2,3}(?:-[A-Z]{2})?)>")  # how a model names the language that it heard
_UNBOUNDED = 1 << 40  # decisions; an RNN-T ends with its frames


@dataclass(slots=True, eq=False)
class _Carried:
    """Hold what the model remembers of a stream: of its encoder, and of its decoding."""

    decoding: TransducerState = field(default_factory=TransducerState)
    keys_values: Any = None
    convolutions: Any = None


class Nemotron(Transducer):
    """Transcribe with a `NemotronAsrStreamingForRNNT`, its extractor and its tokenizer."""

    streams = True

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        self.hop: int = extractor.hop_length
        self.half: int = extractor.n_fft // 2
        self.factor: int = model.config.encoder_config.subsampling_factor
        self.processor = _processor_settings(Path(config.model))
        known = self.processor.get("supported_num_lookahead_tokens") or _LOOKAHEADS
        default = self.processor.get("default_num_lookahead_tokens")
        self._lookahead: int = known[0] if default is None else default
        quick = [lookahead for lookahead in known if self.delay_of(lookahead) <= DELAY]
        self.lookahead: int = max(quick, default=min(known))

    def delay_of(self, lookahead: int) -> float:
        """Return how long after a sound its frame can be computed at most, in seconds."""
        delay: float = (lookahead + 1) * self.frame + self.half / SAMPLE_RATE
        return delay

    def _encoder_options(self, windows: Sequence[WaitingWindow]) -> dict[str, Any]:
        return {"num_lookahead_tokens": self._lookahead}

    def encode(self, windows: Sequence[WaitingWindow]) -> list[tuple[Tensor, TransducerState, int]]:
        """Encode windows of recordings together, and each chunk with what its stream carries."""
        whole = [window for window in windows if not isinstance(window.features, StreamChunk)]
        encoded = iter(super().encode(whole) if whole else [])
        return [
            self._encode_chunk(window, window.features)
            if isinstance(window.features, StreamChunk)
            else next(encoded)
            for window in windows
        ]

    def _encode_chunk(
        self, window: WaitingWindow, chunk: StreamChunk
    ) -> tuple[Tensor, TransducerState, int]:
        carried: _Carried = chunk.state
        options = self._encoder_options([window]) | {"num_lookahead_tokens": self.lookahead}
        output = self._model.get_audio_features(
            input_features=upload(chunk.features[None].to(self.dtype), self.device),
            past_key_values=carried.keys_values,
            padding_cache=carried.convolutions,
            use_cache=True,
            output_attention_mask=False,
            **options,
        )
        carried.keys_values, carried.convolutions = output.past_key_values, output.padding_cache
        return output.pooler_output[0], carried.decoding, _UNBOUNDED

    def open_stream(self) -> AudioStream:
        return NemotronStream(self)

    def mel(self, samples: Audio) -> Tensor:
        """Return features [T, M] of all frames whose window begins and ends within the samples."""
        batch = self._extractor(
            samples, sampling_rate=SAMPLE_RATE, center=False, return_tensors="pt"
        )
        features: Tensor = batch.input_features[0][: int(batch.attention_mask.sum())]
        return features


class NemotronStream(AudioStream):
    """Cut a stream into the chunks that the encoder was trained with.

    The first one has a frame of features and the lookahead, each further one the lookahead and an
    encoder frame more.
    """

    def __init__(self, family: Nemotron):
        self._family = family
        self._builder = WordBuilder(family.spelling)
        self.words = self._builder.words
        self._state = _Carried()
        self._audio: Audio = np.zeros(family.half, np.float32)  # from the next frame's window on
        self._size = 1 + family.factor * family.lookahead  # of the next chunk, in feature frames
        self._received = 0  # samples
        self._sent = 0  # feature frames
        self._heard = 0  # encoder frames

    def feed(self, samples: Any) -> list[StreamChunk]:
        self._received += len(samples)
        return self._cut(samples)

    def _cut(self, samples: Any) -> list[StreamChunk]:
        self._audio = np.concatenate([self._audio, samples])
        chunks = []
        while len(self._audio) >= (needed := self._needed()):
            features = self._family.mel(self._audio[:needed])
            self._audio = self._audio[self._size * self._family.hop :]
            self._sent += self._size
            seconds = self._size * self._family.hop / SAMPLE_RATE
            chunks.append(StreamChunk(features, seconds, self._state))
            self._size = self._family.factor * (self._family.lookahead + 1)
        return chunks

    def finish(self) -> list[StreamChunk]:
        chunks: list[StreamChunk] = []
        while self._sent < self._received // self._family.hop:
            silence = np.zeros(self._needed() - len(self._audio), np.float32)
            chunks += self._cut(silence)
        return chunks

    def hear(self, result: WindowResult) -> None:
        [heard] = result.passes
        spans = [(self._heard + start, self._heard + end) for start, end in heard.spans]
        for timed in self._family.times(replace(heard, spans=spans), float("inf")):
            self._builder.add(timed)
        self.language = result.language or self.language
        self._heard += heard.frames

    def _needed(self) -> int:
        return (self._size - 1) * self._family.hop + 2 * self._family.half


class PromptedNemotron(Nemotron):
    """Transcribe with a `Nemotron3_5AsrForRNNT`, which gets the language or names it by a tag."""

    detects = True

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        prompts = self.processor.get("prompt_dictionary") or DEFAULT_PROMPT_DICTIONARY
        if max(prompts.values()) >= model.config.num_prompts:
            raise ConfigError(
                f"model={config.model!r}: prompt_dictionary names prompt {max(prompts.values())}, the model "
                f"has {model.config.num_prompts}; one of the two files is of another model"
            )
        self._auto: int = prompts.get("auto", model.config.default_prompt_id)
        self._prompts = {code.lower(): id for code, id in prompts.items() if code != "auto"}
        self.languages = frozenset(self._prompts)
        self._tags = {
            id: found[1].lower()
            for token, id in tokenizer.get_vocab().items()
            if (found := _TAG.fullmatch(token))
        }

    def language_of(self, tokens: Sequence[int]) -> str:
        return next((self._tags[token] for token in reversed(tokens) if token in self._tags), "")

    def spelling(self, token: int) -> str:
        return "" if token in self._tags else super().spelling(token)

    def text_of(self, tokens: list[int]) -> str:
        return super().text_of([token for token in tokens if token not in self._tags])

    def _encoder_options(self, windows: Sequence[WaitingWindow]) -> dict[str, Any]:
        prompts = [self._prompts.get(window.options.language, self._auto) for window in windows]
        ids = upload(torch.tensor(prompts), self.device)
        return {**super()._encoder_options(windows), "prompt_ids": ids}


def _processor_settings(folder: Path) -> dict[str, Any]:
    """Return processor_config.json: the lookaheads and the prompts that the model was trained with."""
    path = folder / "processor_config.json"
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text())
        lookaheads = settings.get("supported_num_lookahead_tokens") or _LOOKAHEADS
        prompts = settings.get("prompt_dictionary") or DEFAULT_PROMPT_DICTIONARY
        if not all(isinstance(one, int) and one >= 0 for one in (*lookaheads, *prompts.values())):
            raise ValueError("lookaheads and prompts are numbers from 0 on")
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"model={str(folder)!r}: {path.name} cannot be read: {error}") from error
    return dict(settings)
