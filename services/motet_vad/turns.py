"""Whether somebody has finished speaking, judged from the words: "show me the" goes on, "show me the star" may not.

A network of about ten thousand weights over the last words and the first ones; `models/recipes/pocket_turns.py` trains
it. Words have no list: each is the sum of two rows of a table, found by hashing, so any word of any language has some
meaning, and those of the training data their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from motet_shared.small_network import Sizes, SmallNetwork

LAST, FIRST, ENDING = 6, 2, 2  # words from the end, words from the start, letters that the last word ends with
SLOTS = LAST + FIRST + 1
LONG = 12  # words: longer ones are all the same

_WORDS = re.compile(r"[\w']+")


@dataclass(frozen=True, kw_only=True)
class TurnShape(Sizes):
    """Sizes: rows of the table, numbers in a row, hidden units."""

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
    """Lower case, without the punctuation that a recognizer may or may not have guessed."""
    return _WORDS.findall(text.lower())


def slots(words: list[str]) -> list[str]:
    """What the network sees: the last words, newest first; the first ones; the last one's ending. Empty: none."""
    last = [words[-1 - n] if n < len(words) else "" for n in range(LAST)]
    first = [words[n] if n < len(words) else "" for n in range(FIRST)]
    return [*last, *first, f"-{words[-1][-ENDING:]}" if words else ""]


@lru_cache(20_000)
def rows_of(word: str, rows: int) -> tuple[int, int]:
    """Its two rows. Row 0 stands for no word at all."""
    if not word:
        return 0, 0
    digest = blake2b(word.encode(), digest_size=8).digest()
    one, other = int.from_bytes(digest[:4], "big"), int.from_bytes(digest[4:], "big")
    return 1 + one % (rows - 1), 1 + other % (rows - 1)


def features(text: str, rows: int) -> tuple[NDArray[np.int64], float]:
    """((SLOTS, 2) rows of the table, the length in 0 to 1) of a text."""
    words = words_of(text)
    return np.array([rows_of(word, rows) for word in slots(words)], np.int64), min(len(words), LONG) / LONG


class TurnModel(SmallNetwork[TurnShape]):
    """20 µs per text."""

    model_type, what, setting, sizes = "motet-turns", "end-of-turn model", "turns", TurnShape

    def finished(self, text: str) -> float:
        """The probability that nothing more comes after `text`; 0.5 where no word was heard."""
        if not words_of(text):
            return 0.5
        rows, length = features(text, self.shape.rows)
        seen = self.weights["table"][rows].sum(axis=1).ravel()
        inputs = np.append(seen, np.float32(length))
        hidden = np.tanh(self.weights["hidden.weight"] @ inputs + self.weights["hidden.bias"])
        score = float(self.weights["out.weight"] @ hidden + self.weights["out.bias"][0])
        return float(1 / (1 + np.exp(-score)))
