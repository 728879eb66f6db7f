"""Run Moonshine checkpoints: the input is the waveform, and cost grows with its length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_asr.engine.request import Pass, TimedSegment, WindowResult
from motet_asr.engine.slot_engine import PassOutcome, RunningWindow, SlotFamily
from motet_asr.transcription.align import spread
from motet_kernels.runtime.device import Download
from motet_kernels.spans import upload

from .moonshine_decoder import MoonshineDecoder
from .rules import text_compression

_WINDOW = 30.0  # seconds, unless the settings say otherwise
_TOKENS_PER_SECOND = 6.5  # the model card's bound against repetition loops
_MIN_SAMPLES = SAMPLE_RATE // 10  # samples; the convolutions need more than half of that


class Moonshine(SlotFamily):
    """Transcribe with a `MoonshineForConditionalGeneration`, its extractor and its tokenizer."""

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        self._model, self._extractor, self._tokenizer = model, extractor, tokenizer
        self.device, self.dtype = model.device, model.dtype
        self.window = config.window or _WINDOW
        self.vocab = model.config.vocab_size
        eos = model.generation_config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else eos
        self._start = (
            model.generation_config.decoder_start_token_id or model.config.decoder_start_token_id
        )
        self.decoder = MoonshineDecoder(model)

    def features(self, audio: Audio) -> Tensor:
        audio = np.pad(audio, (0, max(0, _MIN_SAMPLES - len(audio))))
        batch = self._extractor(audio, sampling_rate=SAMPLE_RATE, return_tensors="pt")
        values: Tensor = batch.input_values[0]
        return values

    def encode(self, runs: Sequence[RunningWindow]) -> list[Tensor]:
        """Encode windows of equal length together.

        Lengths are not mixed because the model normalizes over the whole waveform, padding
        included.
        """
        encoded: dict[int, Tensor] = {}
        by_length: dict[int, list[int]] = {}
        for index, run in enumerate(runs):
            by_length.setdefault(len(run.waiting.features), []).append(index)
        for indices in by_length.values():
            batch = torch.stack([runs[index].waiting.features for index in indices]).to(self.dtype)
            batch = upload(batch, self.device)
            encoded |= zip(indices, self._model.model.encoder(batch).last_hidden_state, strict=True)
        return [encoded[index] for index in range(len(runs))]

    def prompt(self, run: RunningWindow) -> list[int]:
        return [self._start]

    def limit(self, run: RunningWindow) -> int:
        return min(max(int(run.waiting.seconds * _TOKENS_PER_SECOND), 2), self.decoder.length)

    def pick(
        self, logits_BV: Tensor, runs: Sequence[RunningWindow]
    ) -> tuple[list[int], list[float]]:
        logprobs_BV = logits_BV.log_softmax(dim=-1)
        logprobs, tokens = (Download(part) for part in logprobs_BV.max(dim=-1))
        return tokens.wait().tolist(), logprobs.wait().tolist()

    def conclude(self, run: RunningWindow) -> PassOutcome:
        count = len(run.generated) + (run.last == self.eos)
        run.result.passes.append(
            Pass(
                tokens=run.generated,
                avg_logprob=run.logprob / max(count, 1),
                logprobs=run.logprobs,
            )
        )
        return "done"

    def segments(self, result: WindowResult, seconds: float, words: bool) -> list[TimedSegment]:
        [window_pass] = result.passes
        text: str = self._tokenizer.decode(window_pass.tokens, skip_special_tokens=True)
        if not text.strip():
            return []
        timed = spread(text, 0.0, seconds) if words else []
        return [
            TimedSegment(
                text,
                0.0,
                seconds,
                window_pass.tokens,
                timed,
                window_pass.avg_logprob,
                0.0,
                0.0,
                text_compression(text),
                window_pass.logprobs,
            )
        ]

    def text_of(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text
