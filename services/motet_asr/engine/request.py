"""Define the engine's requests and results, one window of audio each."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from motet_shared.errors import MotetError

Key = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class TranscriptionOptions:
    """Hold transcriptionOptions of a transcription.

    language: code such as "en"; empty: the model detects it, if it can.
    task: "transcribe", or "translate" into English.
    prompt: text that the model treats as what was said before.
    temperature: 0 is greedy, with fallback to higher ones; above 0 it is the only one.
    words: keep what is needed to time each word.
    timestamps: have the model predict when segments begin and end, if it can.
    seed: of the noise at a temperature above 0.
    """

    language: str = ""
    task: str = "transcribe"
    prompt: str = ""
    temperature: float = 0.0
    words: bool = False
    timestamps: bool = True
    seed: int = 0


@dataclass(slots=True)
class Pass:
    """Hold the result of one decoding pass over (the rest of) a window.

    tokens: without prompt and end token.
    seek: where the pass began, in feature frames.
    frames: feature frames of real audio that it covered.
    avg_logprob: mean log-probability of the tokens.
    logprobs: that of each token.
    skipped: whether the pass was dropped as silence.
    attention_NTF: of the alignment heads, by token and encoder frame, if words were requested; the
        last token has none if the pass ended with it.
    spans: first frame and end frame of each token, where tokens belong to frames of the encoder.
    """

    tokens: list[int]
    seek: int = 0
    frames: int = 0
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    temperature: float = 0.0
    skipped: bool = False
    attention_NTF: torch.Tensor | None = None
    logprobs: list[float] = field(default_factory=list)
    spans: list[tuple[int, int]] = field(default_factory=list)


@dataclass(slots=True)
class WindowResult:
    """Hold the result of a window: its passes in order, or the token of every frame of a CTC model."""

    passes: list[Pass] = field(default_factory=list)
    language: str = ""

    @property
    def tokens(self) -> list[int]:
        """Return the tokens of all passes."""
        return [token for one in self.passes for token in one.tokens]


@dataclass(slots=True)
class StepOutput:
    """Report a window that has ended, with a result or an error.

    Windows in progress have no output.
    """

    key: Key
    result: WindowResult | None = None
    error: MotetError | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """Represent a timed word; seconds from the start of the window or file.

    `text` includes the space before it, if the language has one there.
    """

    text: str
    start: float
    end: float

    def moved(self, seconds: float) -> Word:
        """Return the word `seconds` later."""
        return Word(self.text, self.start + seconds, self.end + seconds)


@dataclass(frozen=True, slots=True)
class TimedSegment:
    """Represent a segment of text with times and confidence values.

    `words` may be rough: see `align.spread`. logprobs: of each of `tokens`.
    """

    text: str
    start: float
    end: float
    tokens: list[int]
    words: list[Word]
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    temperature: float = 0.0
    compression_ratio: float = 0.0
    logprobs: list[float] = field(default_factory=list)
