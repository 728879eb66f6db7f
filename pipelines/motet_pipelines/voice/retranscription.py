"""Align two transcriptions of the same audio: find what the second says beyond the first."""

from __future__ import annotations

import re

_WORD = re.compile(r"\s*\S+")
_WINDOW = 64  # words
_LETTERS = re.compile(r"[^\w']+")


def continued(known: str, text: str) -> str:
    """Return what `text` says beyond `known`, a maybe different transcription of its beginning."""
    text = text.lstrip()
    if text.startswith(known):
        return text[len(known) :]
    known_words, words = [_plain(word) for word in _WORD.findall(known)], _WORD.findall(text)
    return "".join(words[_place(known_words, [_plain(word) for word in words]) :])


def _place(known_words: list[str], words: list[str]) -> int:
    """Return how many of `words` match the `known` ones best, by edit distance.

    Of a long text its end alone is aligned: both are of the same audio.
    """
    skipped = max(0, len(known_words) - _WINDOW)
    first = max(0, skipped - _WINDOW)
    words = words[first : len(known_words) + _WINDOW]
    due, known_words = len(known_words) - first, known_words[skipped:]
    costs = [0] * (len(words) + 1) if skipped else list(range(len(words) + 1))
    for row, one in enumerate(known_words, 1):
        before, costs = costs, [row]
        for column, other in enumerate(words, 1):
            swapped = before[column - 1] + (one != other)
            costs.append(min(swapped, before[column] + 1, costs[-1] + 1))
    return first + min(range(len(costs)), key=lambda count: (costs[count], abs(count - due)))


def _plain(word: str) -> str:
    """Return a word without case and punctuation, in which transcriptions often differ."""
    return _LETTERS.sub("", word).lower()
