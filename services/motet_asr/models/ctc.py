"""Run models with a CTC head: one encoder pass yields every token and its frame.

M mel bins · T feature frames or samples · N output frames · V vocabulary.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import groupby
from math import prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio, Engine, RecognizerFamily
from motet_asr.engine.request import Pass, TimedSegment, WindowResult
from motet_kernels.runtime.device import Download
from motet_kernels.spans import upload
from motet_shared.errors import InternalError

from .timed_tokens import TimedToken, spell, timed_segments

_WINDOW = 30.0  # seconds, unless the settings say otherwise
_MIN_SAMPLES = SAMPLE_RATE // 10  # samples; features are normalized over time and need some


@dataclass(frozen=True, slots=True)
class CtcModel:
    """Describe how a kind of CTC model reads its features.

    frame: seconds of an output frame, from the model's config and its feature extractor.
    count: the method that maps input lengths to numbers of output frames.
    padded: whether windows of different lengths can be padded to one batch, from the config; a
        model that normalizes over the whole window cannot.
    """

    frame: Callable[[Any, Any], float]
    count: str
    padded: Callable[[Any], bool]


def _samples(config: Any, extractor: Any) -> float:
    strides = [*config.conv_stride, *_adapter(config)]
    return float(prod(strides)) / SAMPLE_RATE


def _adapter(config: Any) -> list[int]:
    """Return the strides of the adapter behind an encoder, if it has one."""
    if not getattr(config, "add_adapter", False):
        return []
    return [config.adapter_stride] * config.num_adapter_layers


# Convolutions over samples, with layer norms where windows may be padded, else one group norm.
WAVEFORM = CtcModel(
    _samples,
    "_get_feat_extract_output_lengths",
    lambda config: getattr(config, "feat_extract_norm", "layer") == "layer",
)
# Those whose convolutions behind the mask read into the padding.
UNPADDED = replace(WAVEFORM, padded=lambda config: False)
# Subsampled filter banks.
SPECTRUM = CtcModel(
    lambda config, extractor: (
        config.encoder_config.subsampling_factor * extractor.hop_length / SAMPLE_RATE
    ),
    "_get_subsampling_output_length",
    lambda config: True,
)
LASR = CtcModel(
    lambda config, extractor: (
        config.encoder_config.subsampling_conv_stride**2 * extractor.hop_length / SAMPLE_RATE
    ),
    "_get_subsampling_output_length",
    lambda config: True,
)
GRANITE = CtcModel(
    lambda config, extractor: (
        extractor.frame_stacking
        * 2 ** len(config.encoder_config.subsample_layers)
        * extractor.hop_length
        / SAMPLE_RATE
    ),
    "_get_subsampling_output_length",
    lambda config: True,
)
# Pairs of 10 ms of filter banks.
STACKED = CtcModel(
    lambda config, extractor: 0.01 * extractor.stride * prod(_adapter(config)),
    "_get_feat_extract_output_lengths",
    lambda config: not config.add_adapter,
)


class Ctc(RecognizerFamily):
    """Transcribe with a model with a CTC head, its feature extractor and its tokenizer."""

    word_times = "frames"

    def __init__(
        self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any, kind: CtcModel
    ):
        self._model, self._extractor, self._tokenizer = model, extractor, tokenizer
        self.window = config.window or _WINDOW
        self.vocab = model.config.vocab_size
        self._blank: int = model.config.pad_token_id
        self.device, self.dtype = model.device, model.dtype
        self.frame = kind.frame(model.config, extractor)
        self._count = getattr(model, kind.count)
        self._padded = kind.padded(model.config)
        self._input = model.main_input_name
        self._spelling = functools.partial(spell, tokenizer)

    def features(self, audio: Audio) -> Tensor:
        """Return features [T, M], or samples [T], without padding."""
        audio = np.pad(audio, (0, max(0, _MIN_SAMPLES - len(audio))))
        batch = self._extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        features: Tensor = batch[self._input][0]
        mask = batch.get("attention_mask")
        return features if mask is None else features[: int(mask.sum())]

    def transcribe(self, batch: list[Tensor]) -> list[WindowResult]:
        """Return the likeliest token of every frame, repeats and blanks included."""
        if self._padded:
            return self._transcribe(batch)
        results: dict[int, WindowResult] = {}
        ordered = sorted(range(len(batch)), key=lambda index: len(batch[index]))
        for _, group in groupby(ordered, key=lambda index: len(batch[index])):
            indices = list(group)
            found = self._transcribe([batch[index] for index in indices])
            results |= zip(indices, found, strict=True)
        return [results[index] for index in range(len(batch))]

    def _transcribe(self, batch: list[Tensor]) -> list[WindowResult]:
        lengths = torch.tensor([len(features) for features in batch])
        inputs = {self._input: torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)}
        inputs[self._input] = upload(inputs[self._input].to(self.dtype), self.device)
        if self._padded:
            mask = torch.arange(inputs[self._input].shape[1]) < lengths[:, None]
            inputs["attention_mask"] = upload(mask, self.device)
        logits_BNV = self._model(**inputs).logits.float()
        counts = self._count(lengths).tolist()
        values, indices = (Download(part) for part in logits_BNV.log_softmax(dim=-1).max(dim=-1))
        return [
            _result(tokens_N[:count], logprobs_N[:count])
            for tokens_N, logprobs_N, count in zip(
                indices.wait(), values.wait(), counts, strict=True
            )
        ]

    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        """Split the tokens into segments at pauses in speech."""
        [window_pass] = result.passes
        timed = self._token_times(window_pass, seconds)
        spelling = self._spelling if words else None
        return timed_segments(timed, window_pass.avg_logprob, self.text_of, spelling)

    def text_of(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, group_tokens=False, skip_special_tokens=True)
        return text

    def _token_times(self, frames: Pass, seconds: float) -> list[TimedToken]:
        """Return the tokens without repeats and blanks, with their times in seconds.

        The log-probability of a token is that of its most certain frame.
        """
        token_times, index = [], 0
        for token, group in groupby(frames.tokens):
            count = len(list(group))
            if token != self._blank:
                best = max(frames.logprobs[index : index + count])
                start = min(index * self.frame, seconds)
                end = min((index + count) * self.frame, seconds)
                token_times.append(TimedToken(token, start, end, best))
            index += count
        return token_times


def _result(tokens_N: Tensor, logprobs_N: Tensor) -> WindowResult:
    logprobs = logprobs_N.tolist()
    mean = sum(logprobs) / max(len(logprobs), 1)
    return WindowResult([Pass(tokens=tokens_N.tolist(), avg_logprob=mean, logprobs=logprobs)])


class CtcEngine(Engine):
    """Transcribe one whole batch of windows per step."""

    decoding = "CTC"
    family: Ctc

    def __init__(self, config: EngineConfig, family: Ctc):
        super().__init__(config, family)

    def _drop(self) -> None:
        """Do nothing: a step ends all its windows."""

    def _step(self) -> None:
        taken = self._take(self.config.max_rows)
        self.counts.batch_size = len(taken)
        if not taken:
            return
        results = self.family.transcribe([waiting.features for waiting in taken])
        for waiting, result in zip(taken, results, strict=True):
            self.counts.encoded += 1
            self.counts.audio_seconds += waiting.seconds
            self.counts.tokens += len(result.tokens)
            if all(map(math.isfinite, (one.avg_logprob for one in result.passes))):
                self._end(waiting.key, result)
            else:
                problem = "the model computed NaN or infinity for this audio"
                self._end(waiting.key, error=InternalError(problem))
