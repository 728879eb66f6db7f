"""Compute when each word of a sentence is spoken, in milliseconds.

Times are exact where the model reports where its words begin (VITS from its durations, pocket-tts
from its pointer). Otherwise the length of the sentence is divided by the length of what is spoken:
letters, and a pause for punctuation. Words not yet spoken are estimated from the pace of earlier
sentences.
"""

from __future__ import annotations

from collections.abc import Sequence

WordTime = tuple[str, int, int]

_LETTER_MS = 70.0  # per letter, until a pace is measured for the voice
_PREVIOUS_WEIGHT = 0.3  # weight that the old pace keeps when a sentence is measured
_PAUSES = {
    ",": 3.0,
    ";": 4.0,
    ":": 4.0,
    ".": 5.0,
    "!": 5.0,
    "?": 5.0,
    "…": 5.0,
    "—": 4.0,
    "–": 3.0,
}  # unit: letters


class Pace:
    """Track milliseconds per letter of each voice, at speed 1."""

    def __init__(self) -> None:
        self._by_voice: dict[str, float] = {}

    def of(self, voice: str) -> float:
        """Return the milliseconds per letter of a voice."""
        return self._by_voice.get(voice, _LETTER_MS)

    def update(self, voice: str, words: Sequence[tuple[str, str]], milliseconds: float) -> None:
        """Adjust a voice's pace to a sentence of `words` that took `milliseconds`."""
        letters = sum(_weights(words))
        if letters:
            old, new = self.of(voice), milliseconds / letters
            self._by_voice[voice] = old + (1 - _PREVIOUS_WEIGHT) * (new - old)


def distribute_words(
    words: Sequence[tuple[str, str]], begin: float, length: float
) -> list[WordTime]:
    """Return times of (written, spoken) words that take `length` ms together, from `begin`."""
    weights = _weights(words)
    total = sum(weights)
    times, at = [], begin
    for (written, _), weight in zip(words, weights, strict=True):
        end = at + (length * weight / total if total else 0.0)
        times.append((written, round(at), round(end)))
        at = end
    return times


def words_from_starts(
    words: Sequence[tuple[str, str]],
    starts: Sequence[float],
    begin: float,
    *,
    letter_ms: float,
    length: float | None = None,
) -> list[WordTime]:
    """Return times of (written, spoken) words; the first spoken ones begin at `starts`.

    `starts` count from `begin`. Later words follow at `letter_ms` per letter, and so does the end
    of the last word if the `length` of the sentence is not known.
    """
    times: list[WordTime] = []
    known, at = list(starts), starts[0] if starts else 0.0
    last = sum(1 for _, spoken in words if spoken)
    for (written, spoken), weight in zip(words, _weights(words), strict=True):
        start = at
        if spoken:
            start, last = (known.pop(0) if known else at), last - 1
            at = known[0] if known else start + letter_ms * weight
            at = length if length is not None and not last else at
        times.append((written, round(begin + start), round(begin + at)))
    return times


def _weights(words: Sequence[tuple[str, str]]) -> list[float]:
    return [
        len(spoken) + 1 + _PAUSES.get(spoken[-1], 0.0) if spoken else 0.0 for _, spoken in words
    ]
