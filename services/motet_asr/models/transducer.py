"""Run transducers on FastConformer encoders: Parakeet-RNNT and Parakeet-TDT.

B rows · T feature frames · M mel bins · N encoder frames · E size of the joint network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio, WaitingWindow
from motet_asr.engine.request import Pass, TimedSegment, WindowResult
from motet_asr.engine.transducer_engine import TransducerFamily, TransducerState
from motet_kernels.spans import upload
from motet_shared.errors import ConfigError

from .timed_tokens import TimedToken, spell, timed_segments

_WINDOW = 30.0  # seconds, unless the settings say otherwise
_MIN_SAMPLES = SAMPLE_RATE // 10  # samples; features are normalized over time and need some


class Transducer(TransducerFamily):
    """Transcribe with a `ParakeetForRNNT` or `ParakeetForTDT`, its extractor and its tokenizer."""

    word_times = "frames"

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        self._model, self._extractor, self._tokenizer = model, extractor, tokenizer
        self.window = config.window or _WINDOW
        self.vocab = model.config.vocab_size
        self.blank = model.config.blank_token_id
        start = model.generation_config.decoder_start_token_id
        self.start = self.blank if start is None else start
        self.durations = tuple(getattr(model.config, "durations", ()))
        self.max_symbols = model.config.max_symbols_per_step
        self.device, self.dtype = model.device, model.dtype
        if self.max_symbols < 1 or any(duration < 0 for duration in self.durations):
            raise ConfigError(
                f"model={config.model!r}: max_symbols_per_step={self.max_symbols}, durations={self.durations}; "
                "give at least one symbol a step, and durations from 0 on"
            )
        factor = model.config.encoder_config.subsampling_factor
        self.frame = factor * extractor.hop_length / SAMPLE_RATE

    def features(self, audio: Audio) -> Tensor:
        """Return features [T, M] without padding."""
        audio = np.pad(audio, (0, max(0, _MIN_SAMPLES - len(audio))))
        batch = self._extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        features: Tensor = batch.input_features[0][: int(batch.attention_mask.sum())]
        return features

    def encode(self, windows: Sequence[WaitingWindow]) -> list[tuple[Tensor, TransducerState, int]]:
        batch = [window.features for window in windows]
        lengths = torch.tensor([len(features) for features in batch])
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        output = self._model.get_audio_features(
            input_features=upload(padded.to(self.dtype), self.device),
            attention_mask=upload(mask, self.device),
            output_attention_mask=True,
            **self._encoder_options(windows),
        )
        counts = output.attention_mask.sum(-1).tolist()
        return [
            (frames_NE[:count], TransducerState(), self._limit(length))
            for frames_NE, count, length in zip(
                output.pooler_output, counts, lengths.tolist(), strict=True
            )
        ]

    def _encoder_options(self, windows: Sequence[WaitingWindow]) -> dict[str, Any]:
        """Return what the encoder needs to know beside the features."""
        return {}

    def _limit(self, length: int) -> int:
        """Return the most decisions for `length` feature frames, as transformers bounds them.

        It counts the frame of padding that the extractor adds, and the start token.
        """
        frames = self._model.encoder._get_subsampling_output_length(torch.tensor([length + 1]))
        return self.max_symbols * int(frames) - 1

    def predict(self, tokens: list[int], states: Sequence[TransducerState]) -> None:
        network = self._model.decoder
        ids = upload(torch.tensor(tokens)[:, None], self.device)
        given = [(state.hidden, state.cell) for state in states]
        carried = None
        if (first := given[0][0]) is not None:
            zero = torch.zeros_like(first)
            hidden, cell = zip(
                *((zero, zero) if h is None else (h, c) for h, c in given), strict=True
            )
            carried = torch.stack(hidden, dim=1), torch.stack(cell, dim=1)
        outputs, (hidden_LBE, cell_LBE) = network.lstm(network.embedding(ids), carried)
        outputs_BE = network.decoder_projector(outputs)[:, 0]
        for row, state in enumerate(states):
            state.output = outputs_BE[row]
            state.hidden, state.cell = hidden_LBE[:, row], cell_LBE[:, row]

    def join(self, frames_BFE: Tensor, outputs_BE: Tensor) -> Tensor:
        logits: Tensor = self._model.joint(
            encoder_hidden_states=frames_BFE, decoder_hidden_states=outputs_BE[:, None]
        )
        return logits.float()

    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        """Split the tokens into segments at pauses in speech."""
        [window_pass] = result.passes
        timed = self.times(window_pass, seconds)
        spelling = self.spelling if words else None
        return timed_segments(timed, window_pass.avg_logprob, self.text_of, spelling)

    def spelling(self, token: int) -> str:
        """Return the letters of a token, with spaces."""
        return spell(self._tokenizer, token)

    def text_of(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, group_tokens=False, skip_special_tokens=True)
        return text

    def times(self, window_pass: Pass, seconds: float) -> list[TimedToken]:
        """Return the tokens with times of at most `seconds`."""
        return [
            TimedToken(
                token, min(start * self.frame, seconds), min(end * self.frame, seconds), logprob
            )
            for token, (start, end), logprob in zip(
                window_pass.tokens, window_pass.spans, window_pass.logprobs, strict=True
            )
        ]
