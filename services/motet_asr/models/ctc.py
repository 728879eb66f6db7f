"""Run Parakeet-CTC checkpoints: one encoder pass yields every token and its frame.

M mel bins · T feature frames · N output frames · V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio, Engine, RecognizerFamily
from motet_asr.engine.request import Pass, TimedSegment, WindowResult, Word
from motet_kernels.runtime.device import Download
from motet_kernels.spans import upload

from .rules import text_compression

_WINDOW = 30.0  # seconds, unless the settings say otherwise
_MIN_SAMPLES = SAMPLE_RATE // 10  # samples; features are normalized over time and need some
_SEGMENT_PAUSE = 0.8  # seconds without a token that separate two segments


class Parakeet(RecognizerFamily):
    """Transcribe with a `ParakeetForCTC`, its feature extractor and its tokenizer."""

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        self._model, self._extractor, self._tokenizer = model, extractor, tokenizer
        self.window = config.window or _WINDOW
        self.vocab = model.config.vocab_size
        self._blank: int = model.config.pad_token_id
        self.device, self.dtype = model.device, model.dtype
        self.frame = (
            model.config.encoder_config.subsampling_factor * extractor.hop_length / SAMPLE_RATE
        )

    def features(self, audio: Audio) -> Tensor:
        """Return features [T, M], of which the last frame is padding."""
        audio = np.pad(audio, (0, max(0, _MIN_SAMPLES - len(audio))))
        features: Tensor = self._extractor(
            audio, sampling_rate=SAMPLE_RATE, return_tensors="pt"
        ).input_features[0]
        return features

    def transcribe(self, batch: list[Tensor]) -> list[WindowResult]:
        """Return the likeliest token of every frame, repeats and blanks included."""
        lengths = torch.tensor([len(features) - 1 for features in batch])
        padded = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        mask = torch.arange(padded.shape[1]) < lengths[:, None]
        features, mask = upload(padded.to(self.dtype), self.device), upload(mask, self.device)
        logits_BNV = self._model(input_features=features, attention_mask=mask).logits.float()
        counts = self._model._get_subsampling_output_length(lengths).tolist()
        values, indices = (Download(part) for part in logits_BNV.log_softmax(dim=-1).max(dim=-1))
        result = []
        for tokens_N, logprobs_N, count in zip(indices.wait(), values.wait(), counts, strict=True):
            tokens = tokens_N[:count].tolist()
            result.append(
                WindowResult(
                    [
                        Pass(
                            tokens=tokens,
                            avg_logprob=float(logprobs_N[:count].mean()),
                            logprobs=logprobs_N[:count].tolist(),
                        )
                    ]
                )
            )
        return result

    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        """Split the tokens into segments at pauses in speech."""
        [window_pass] = result.passes
        segments: list[TimedSegment] = []
        for timed in _split(self._token_times(window_pass, seconds)):
            tokens = [one.token for one in timed]
            text = self.text_of(tokens)
            if text.strip():
                text = " " + text.strip()
                timed_words = self._words(timed) if words else []
                start, end = timed[0].start, timed[-1].end
                segments.append(
                    TimedSegment(
                        text,
                        start,
                        end,
                        tokens,
                        timed_words,
                        window_pass.avg_logprob,
                        0.0,
                        0.0,
                        text_compression(text),
                        [one.logprob for one in timed],
                    )
                )
        return segments

    def text_of(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, group_tokens=False, skip_special_tokens=True)
        return text

    def _token_times(self, frames: Pass, seconds: float) -> list[_TimedToken]:
        """Return the tokens without repeats and blanks, with their times in seconds.

        The log-probability of a token is that of its most certain frame.
        """
        token_times, index = [], 0
        for token, group in groupby(frames.tokens):
            count = len(list(group))
            if token != self._blank:
                best = max(frames.logprobs[index : index + count])
                start, end = index * self.frame, min((index + count) * self.frame, seconds)
                token_times.append(_TimedToken(token, start, end, best))
            index += count
        return token_times

    def _words(self, tokens: list[_TimedToken]) -> list[Word]:
        """Group tokens into words; a token that starts with a space begins a word."""
        words: list[Word] = []
        for one in tokens:
            spelling = self._tokenizer.convert_ids_to_tokens(one.token)
            text = spelling.replace("▁", " ")
            if words and not text.startswith(" "):
                words[-1] = Word(words[-1].text + text, words[-1].start, one.end)
            else:
                text = text if text.startswith(" ") else " " + text
                words.append(Word(text, one.start, one.end))
        return [word for word in words if word.text.strip()]


@dataclass(frozen=True, slots=True)
class _TimedToken:
    """A token with its times in seconds."""

    token: int
    start: float
    end: float
    logprob: float


def _split(token_times: list[_TimedToken]) -> list[list[_TimedToken]]:
    runs: list[list[_TimedToken]] = []
    for entry in token_times:
        if runs and entry.start - runs[-1][-1].end < _SEGMENT_PAUSE:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs


class CtcEngine(Engine):
    """Transcribe one whole batch of windows per step."""

    family: Parakeet

    def __init__(self, config: EngineConfig, family: Parakeet):
        super().__init__(config, family)

    def _step(self) -> None:
        taken = self._take(self.config.max_rows)
        self.counts.batch_size = len(taken)
        if not taken:
            return
        for waiting, result in zip(
            taken,
            self.family.transcribe([window_pass.features for window_pass in taken]),
            strict=True,
        ):
            self.counts.encoded += 1
            self.counts.audio_seconds += waiting.seconds
            self.counts.tokens += len(result.tokens)
            self._end(waiting.key, result)
