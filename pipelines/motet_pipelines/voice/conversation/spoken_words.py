"""Align the words of a message with its audio, for captions in step and for truncated replies."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from motet_media.audio import duration_ms
from motet_pipelines.voice.speak import RATE
from motet_shared.messages import Audio


class SpokenState(msgspec.Struct, frozen=True):
    """What was said until when; the fields are those of `SpokenWords`."""

    ms: float = 0.0
    text: str = ""
    cut: bool = False
    settled: list[tuple[int, int]] = []
    until: int = 0
    words: list[tuple[str, int, int]] = []


class SpokenWords:
    """Keep one message: its text as it is generated, its words as they are spoken."""

    def __init__(self, state: SpokenState | None = None) -> None:
        state = state or SpokenState()
        self.ms = state.ms  # ms of audio
        self.text = state.text
        self._cut = state.cut
        # (text offset after a word, ms at its end), of whole sentences
        self._settled = list(state.settled)
        self._until = state.until  # text offset after the last whole sentence
        self._words = list(state.words)  # of the sentence that is being spoken

    def state(self) -> SpokenState:
        return SpokenState(self.ms, self.text, self._cut, self._settled, self._until, self._words)

    def write(self, text: str) -> None:
        if not self._cut:
            self.text += text

    def note(self, items: Iterable[Audio]) -> None:
        """Add the audio that is sent to the client."""
        for item in () if self._cut else items:
            self.ms += duration_ms(len(item.data), RATE)
            self._words = item.words or self._words
            if item.text > self._until:
                self._settled += self._places(self._words)
                self._until, self._words = item.text, []

    @property
    def spoken(self) -> int:
        """Return the text offset after the last word whose audio was sent."""
        ends = [place for place, end in self._places(self._words) if end <= self.ms]
        return max([self._until, *ends])

    def heard(self, ms: float) -> str:
        """Return the text up to the last word that ends within the first `ms` of audio."""
        if ms >= self.ms:
            return self.text[: self.spoken]
        places = [place for place, end in [*self._settled, *self._places(self._words)] if end <= ms]
        return self.text[: max(places, default=0)]

    def cut(self, ms: float) -> None:
        """Truncate the message after `ms` of audio; later text and audio are ignored."""
        self._cut, self.text = True, self.heard(ms)
        self._settled = [(place, end) for place, end in self._settled if place <= len(self.text)]
        self._until, self._words, self.ms = len(self.text), [], ms

    def _places(self, words: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
        """Return where the words after `_until` end: (text offset, ms)."""
        found, at = [], self._until
        for word, _, end in words:
            place = self.text.find(word, at)
            if place >= 0:
                at = place + len(word)
                found.append((at, end))
        return found
