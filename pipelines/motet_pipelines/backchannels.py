"""Words of a listener: "mhm" and "yeah" tell a speaker to go on, a cough tells nothing. Neither interrupts.

The list is short on purpose: what is not on it counts as something said.
"""

from __future__ import annotations

import re

_SOUNDS = "ah aha eh er erm ha haha hm hmm huh mhm mm mmm mmhm mmhmm mmm oh ooh uh uhhuh uhuh um umm wow"
_ENGLISH = "alright cool great nice ok okay right sure yeah yep yes yup"
_OTHERS = "genau ja jaja klar d'accord oui ouais voilà claro sí vale sì certo はい うん ええ 네 응 嗯 对"
WORDS = frozenset(f"{_SOUNDS} {_ENGLISH} {_OTHERS}".split())
PHRASES = ("i see", "got it", "all right", "of course", "ach so")

_NOTES = re.compile(r"\[[^\]]*\]|\([^)]*\)|\*[^*]*\*|♪[^♪]*♪?")  # what a recognizer writes of sounds: "[cough]"
_BREAKS = re.compile(r"(?<=\w)-(?=\w)")  # uh-huh is one word
_WORD = re.compile(r"[\w']+")


def words_that_count(text: str) -> int:
    """How many words of `text` say something."""
    plain = _BREAKS.sub("", _NOTES.sub(" ", text)).lower().replace("’", "'")
    words = " ".join(_WORD.findall(plain))
    for phrase in PHRASES:
        words = re.sub(rf"\b{phrase}\b", " ", words)
    return sum(word not in WORDS for word in words.split())
