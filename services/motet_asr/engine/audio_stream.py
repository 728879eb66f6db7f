"""Define the live streams of models that hear audio chunk by chunk, each chunk once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from .request import WindowResult, Word


@dataclass(frozen=True, slots=True, eq=False)
class StreamChunk:
    """Hold the features of the next stretch of a stream, which an engine takes as a window.

    seconds: its length.
    state: what the model remembers of the stream; the engine changes it.
    """

    features: Tensor
    seconds: float
    state: Any


class AudioStream(ABC):
    """Cut one live stream into chunks, and join what was heard in them.

    words: all words so far; only the last one may still grow.
    language: code of the language that the model named, or empty.
    """

    words: list[Word]
    language: str = ""

    @abstractmethod
    def feed(self, samples: Any) -> list[StreamChunk]:
        """Return the chunks that float32 `samples`, at the family's `stream_rate`, complete."""

    @abstractmethod
    def finish(self) -> list[StreamChunk]:
        """Return the chunks that are left at the end of the stream, filled with silence."""

    @abstractmethod
    def hear(self, result: WindowResult) -> None:
        """Append what was heard in the next chunk to `words`."""
