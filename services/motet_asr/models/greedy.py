"""Decode greedily, without timestamps: what all encoder-decoder families but Whisper share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from motet_asr.config import EngineConfig
from motet_asr.engine.request import Pass, TimedSegment, WindowResult
from motet_asr.engine.slot_engine import PassOutcome, RunningWindow, SlotFamily
from motet_asr.transcription.align import UNSPACED, spread
from motet_kernels.runtime.device import Download

from .rules import text_compression

_WINDOW = 30.0  # seconds, unless the settings say otherwise


class GreedyFamily(SlotFamily):
    """Take the likeliest token at a time; a window is one segment, and its words are not timed.

    A family sets `decoder`, and says how its audio is encoded and its prompts begin.
    """

    def __init__(self, config: EngineConfig, model: Any, extractor: Any, tokenizer: Any):
        self._model, self._extractor, self._tokenizer = model, extractor, tokenizer
        self.device, self.dtype = model.device, model.dtype
        self.window = config.window or _WINDOW
        self.vocab = model.config.vocab_size
        eos = model.generation_config.eos_token_id
        self.eos = eos[0] if isinstance(eos, list) else eos

    def pick(
        self, logits_BV: Tensor, runs: Sequence[RunningWindow]
    ) -> tuple[list[int], list[float]]:
        logprobs_BV = logits_BV.log_softmax(dim=-1)
        logprobs, tokens = (Download(part) for part in logprobs_BV.max(dim=-1))
        return tokens.wait().tolist(), logprobs.wait().tolist()

    def conclude(self, run: RunningWindow) -> PassOutcome:
        count = len(run.generated) + (run.last == self.eos)
        run.result.language = run.language
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
        text = self.text_of(window_pass.tokens)
        return whole_window(text, window_pass, result.language, seconds, words)

    def text_of(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


def whole_window(
    text: str, window_pass: Pass, language: str, seconds: float, words: bool
) -> list[TimedSegment]:
    """Return a window's text as one segment, whose words have rough times; none without text."""
    if not text.strip():
        return []
    spaced = language not in UNSPACED
    return [
        TimedSegment(
            text,
            0.0,
            seconds,
            window_pass.tokens,
            spread(text, 0.0, seconds, spaced) if words else [],
            window_pass.avg_logprob,
            0.0,
            0.0,
            text_compression(text),
            window_pass.logprobs,
        )
    ]
