"""Predict from the words whether a turn has ended.

"show me the" continues, "show me the star" may not. The network has about ten thousand weights over
the last and the first words; `models/recipes/turns/train.py` trains it. There is no vocabulary:
each word is the sum of two rows of a table, found by hashing, so every word of any language has a
representation, and words of the training data a trained one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from motet_models.small_network import Sizes, SmallNetwork

LAST, FIRST, ENDING = (
    6,
    2,
    2,
)  # words from the end, words from the start, final letters of the last word
SLOTS = LAST + FIRST + 1
MAX_WORDS = 12  # words: longer texts count as this long

_WORDS = re.compile(r"[\w']+")


@dataclass(frozen=True, kw_only=True)
class TurnShape(Sizes):
    """Define the sizes of the network: rows of the table, numbers in a row, hidden units."""

    rows: int = 1024
    width: int = 8
    hidden: int = 32

    def tensors(self) -> dict[str, tuple[int, ...]]:
        inputs = SLOTS * self.width + 1
        return {
            "table": (self.rows, self.width),
            "hidden.weight": (self.hidden, inputs),
            "hidden.bias": (self.hidden,),
            "out.weight": (self.hidden,),
            "out.bias": (1,),
        }


def words_of(text: str) -> list[str]:
    """Return lower-case words without punctuation, which recognizers predict inconsistently."""
    return _WORDS.findall(text.lower())


def slots(words: list[str]) -> list[str]:
    """Return the network's inputs: last words, newest first; first words; the last word's ending.

    "" where there is none.
    """
    last = [words[-1 - n] if n < len(words) else "" for n in range(LAST)]
    first = [words[n] if n < len(words) else "" for n in range(FIRST)]
    return [*last, *first, f"-{words[-1][-ENDING:]}" if words else ""]


@lru_cache(20_000)
def rows_of(word: str, rows: int) -> tuple[int, int]:
    """Return the two table rows of a word; row 0 stands for no word."""
    if not word:
        return 0, 0
    digest = blake2b(word.encode(), digest_size=8).digest()
    one, other = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
    return 1 + one % (rows - 1), 1 + other % (rows - 1)


def features(text: str, rows: int) -> tuple[NDArray[np.int64], float]:
    """Return the inputs of a text: (SLOTS, 2) table rows, and its length in 0 to 1."""
    words = words_of(text)
    return np.array([rows_of(word, rows) for word in slots(words)], np.int64), min(
        len(words), MAX_WORDS
    ) / MAX_WORDS


class TurnModel(SmallNetwork[TurnShape]):
    """Predict ends of turns; 20 µs per text."""

    model_type, what, setting, sizes = "motet-turns", "end-of-turn model", "turns", TurnShape

    def end_probability(self, text: str) -> float:
        """Return the probability that the turn ends with `text`; 0.5 if it has no words."""
        if not words_of(text):
            return 0.5
        rows, length = features(text, self.shape.rows)
        seen = self.weights["table"][rows].sum(axis=1).ravel()
        inputs = np.append(seen, np.float32(length))
        hidden = np.tanh(self.weights["hidden.weight"] @ inputs + self.weights["hidden.bias"])
        score = float(self.weights["out.weight"] @ hidden + self.weights["out.bias"][0])
        return float(1 / (1 + np.exp(-score)))
