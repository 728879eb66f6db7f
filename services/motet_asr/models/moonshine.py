"""Run Moonshine checkpoints: the input is the waveform, and cost grows with its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_asr.engine.slot_engine import RunningWindow
from motet_kernels.spans import upload

from .attention_decoder import MoonshineDecoder, StreamingMoonshineDecoder
from .greedy import GreedyFamily

_TOKENS_PER_SECOND = 6.5  # the model card's bound against repetition loops
_MIN_SAMPLES = SAMPLE_RATE // 10  # samples; the convolutions need more than half of that


class Moonshine(GreedyFamily):
    """Transcribe with a `MoonshineForConditionalGeneration`, its extractor and its tokenizer."""

    decoder_class: type[MoonshineDecoder] = MoonshineDecoder

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        super().__init__(config, model, extractor, tokenizer)
        self._start = (
            model.generation_config.decoder_start_token_id or model.config.decoder_start_token_id
        )
        self.decoder = self.decoder_class(model)

    def features(self, audio: Audio) -> Tensor:
        audio = np.pad(audio, (0, max(0, _MIN_SAMPLES - len(audio))))
        batch = self._extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        values: Tensor = batch.input_values[0]
        return values

    def encode(self, runs: Sequence[RunningWindow]) -> list[Tensor]:
        """Encode windows of equal length together.

        Lengths are not mixed because the model reads padding too: it normalizes over the whole
        waveform, or its convolutions go on behind a window's end.
        """
        encoded: dict[int, Tensor] = {}
        by_length: dict[int, list[int]] = {}
        for index, run in enumerate(runs):
            by_length.setdefault(len(run.waiting.features), []).append(index)
        for indices in by_length.values():
            batch = torch.stack([runs[index].waiting.features for index in indices]).to(self.dtype)
            encoded |= zip(indices, self._encode(upload(batch, self.device)), strict=True)
        return [encoded[index] for index in range(len(runs))]

    def _encode(self, samples: Tensor) -> Sequence[Tensor]:
        """Return the states [S, E] of windows of equal length."""
        states: Tensor = self._model.model.encoder(samples).last_hidden_state
        return list(states)

    def prompt(self, run: RunningWindow) -> list[int]:
        return [self._start]

    def limit(self, run: RunningWindow) -> int:
        return min(max(int(run.waiting.seconds * _TOKENS_PER_SECOND), 2), self.decoder.length)


class StreamingMoonshine(Moonshine):
    """Transcribe with a `MoonshineStreamingForConditionalGeneration`, whose frames see 16 others.

    Its encoder could go on where it stopped; its decoder reads everything again, so that live
    streams are transcribed repeatedly, as with Moonshine.
    """

    decoder_class = StreamingMoonshineDecoder

    def _encode(self, samples: Tensor) -> Sequence[Tensor]:
        """Return the states of windows of equal length; frames that are not whole are left out."""
        encoder, length = self._model.model.encoder, samples.shape[1]
        padded = F.pad(samples, (0, -length % encoder.embedder.frame_len))
        mask = torch.arange(padded.shape[1], device=self.device) < length
        output = encoder(padded, attention_mask=mask.expand(len(padded), -1))
        count = int(output.attention_mask[0].sum())
        return list(output.last_hidden_state[:, :count])
