"""What was said aloud, word by word: for captions in step with the sound, and for replies that were cut short."""

from __future__ import annotations

from collections.abc import Iterable

from motet_pipelines.speak import RATE
from motet_shared.audio import duration_ms
from motet_shared.messages import Audio


class Spoken:
    """One message: its text as it is written, its words as they are spoken."""

    def __init__(self) -> None:
        self.ms = 0.0  # of sound
        self.text = ""
        self._cut = False
        self._settled: list[tuple[int, int]] = []  # (place in the text behind a word, ms at its end), whole sentences
        self._until = 0  # place in the text behind the last whole sentence
        self._words: list[tuple[str, int, int]] = []  # of the sentence that is being spoken

    def write(self, text: str) -> None:
        if not self._cut:
            self.text += text

    def note(self, items: Iterable[Audio]) -> None:
        """Add what is sent to the client."""
        for item in () if self._cut else items:
            self.ms += duration_ms(len(item.data), RATE)
            self._words = item.words or self._words
            if item.text > self._until:
                self._settled += self._places(self._words)
                self._until, self._words = item.text, []

    @property
    def told(self) -> int:
        """Place in the text behind the last word whose sound was sent."""
        ends = [place for place, end in self._places(self._words) if end <= self.ms]
        return max([self._until, *ends])

    def heard(self, ms: float) -> str:
        """The text up to the last word that was heard to its end within `ms`."""
        if ms >= self.ms:
            return self.text[: self.told]
        places = [place for place, end in [*self._settled, *self._places(self._words)] if end <= ms]
        return self.text[: max(places, default=0)]

    def cut(self, ms: float) -> None:
        """Nothing after `ms` was heard, whatever is still to come."""
        self._cut, self.text = True, self.heard(ms)
        self._settled = [(place, end) for place, end in self._settled if place <= len(self.text)]
        self._until, self._words, self.ms = len(self.text), [], ms

    def _places(self, words: list[tuple[str, int, int]]) -> list[tuple[int, int]]:
        """Where the words of the sentence after `_until` end: in the text, and in ms."""
        found, at = [], self._until
        for word, _, end in words:
            place = self.text.find(word, at)
            if place >= 0:
                at = place + len(word)
                found.append((at, end))
        return found
