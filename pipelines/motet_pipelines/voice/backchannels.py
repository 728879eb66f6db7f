"""Distinguish backchannels ("mhm", "yeah", a cough) from words that interrupt a speaker.

The list is short on purpose: any word that is not on it counts as an interruption.
"""

from __future__ import annotations

import re

_SOUNDS = (
    "ah aha eh er erm ha haha hm hmm huh mhm mm mmm mmhm mmhmm mmm oh ooh uh uhhuh uhuh um umm wow"
)
_ENGLISH = "alright cool great nice ok okay right sure yeah yep yes yup"
_OTHERS = (
    "genau ja jaja klar d'accord oui ouais voilà claro sí vale sì certo はい うん ええ 네 응 嗯 对"
)
WORDS = frozenset(f"{_SOUNDS} {_ENGLISH} {_OTHERS}".split())
PHRASES = ("i see", "got it", "all right", "of course", "ach so")

# Notes that recognizers write for sounds, such as "[cough]".
_NOTES = re.compile(r"\[[^\]]*\]|\([^)]*\)|\*[^*]*\*|♪[^♪]*♪?")
_BREAKS = re.compile(r"(?<=\w)-(?=\w)")  # uh-huh is one word
_WORD = re.compile(r"[\w']+")


def words_that_count(text: str) -> int:
    """Return the number of words in `text` that are no backchannels."""
    plain = _BREAKS.sub("", _NOTES.sub(" ", text)).lower().replace("’", "'")
    words = " ".join(_WORD.findall(plain))
    for phrase in PHRASES:
        words = re.sub(rf"\b{phrase}\b", " ", words)
    return sum(word not in WORDS for word in words.split())
