"""What the engine is asked, one window of audio at a time, and what it answers."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from motet_shared.errors import MotetError

Key = Hashable


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How to listen.

    language: code such as "en"; empty: the model finds out, if it can.
    task: "transcribe", or "translate" into English.
    prompt: text that the model takes for what was said before.
    temperature: 0 is greedy, with fallback to higher ones; above 0 it is the only one.
    words: keep what is needed to time each word.
    timestamps: have the model say when segments begin and end, if it can.
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
    """One decoding of (the rest of) a window.

    seek: where it began, in feature frames. tokens: without prompt and end token.
    attention_NTF: of the alignment heads, by token and encoder frame, if words were asked for; the last token has none
        if the pass ended with it. frames: feature frames of real audio that it saw.
    """

    tokens: list[int]
    seek: int = 0
    frames: int = 0
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    temperature: float = 0.0
    skipped: bool = False
    attention_NTF: torch.Tensor | None = None


@dataclass(slots=True)
class Heard:
    """All that the engine made of a window: the passes in order, or for a CTC model the token of every frame."""

    passes: list[Pass] = field(default_factory=list)
    language: str = ""

    @property
    def tokens(self) -> list[int]:
        return [token for one in self.passes for token in one.tokens]


@dataclass(slots=True)
class StepOutput:
    """A window has ended, well or not. Nothing is said of windows that go on."""

    key: Key
    heard: Heard | None = None
    error: MotetError | None = None


@dataclass(frozen=True, slots=True)
class Word:
    """`text` with the space before it, if the language puts one there. Seconds from the start of the window or file."""

    text: str
    start: float
    end: float

    def moved(self, seconds: float) -> Word:
        return Word(self.text, self.start + seconds, self.end + seconds)


@dataclass(frozen=True, slots=True)
class Piece:
    """A stretch of text with its times, and how sure the model was. `words` may be rough: see `align.spread`."""

    text: str
    start: float
    end: float
    tokens: list[int]
    words: list[Word]
    avg_logprob: float = 0.0
    no_speech_prob: float = 0.0
    temperature: float = 0.0
    compression_ratio: float = 0.0
