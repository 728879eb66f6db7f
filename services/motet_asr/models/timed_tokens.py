"""Make segments and timed words of tokens whose frames are known: those of CTC and of transducers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from motet_asr.engine.request import TimedSegment, Word

from .rules import text_compression

_SEGMENT_PAUSE = 0.8  # seconds without a token that separate two segments


@dataclass(frozen=True, slots=True)
class TimedToken:
    """A token with its times in seconds."""

    token: int
    start: float
    end: float
    logprob: float


class WordBuilder:
    """Group timed tokens into words: a space begins one, and has no time of its own.

    words: all so far; only the last one may still grow.
    """

    def __init__(self, spelling: Callable[[int], str]):
        self.words: list[Word] = []
        self._spelling = spelling
        self._begins = True

    def add(self, one: TimedToken) -> None:
        """Append a token; one without letters only ends a word."""
        text = self._spelling(one.token)
        self._begins = self._begins or text.startswith(" ")
        if not text.strip():
            return
        if self._begins:
            self.words.append(Word(" " + text.strip(), one.start, one.end))
        else:
            word = self.words[-1]
            self.words[-1] = Word(word.text + text.rstrip(), word.start, one.end)
        self._begins = text.endswith(" ")


def spell(tokenizer: Any, token: int) -> str:
    """Return the letters of a token, with spaces; those of a special one are empty.

    wav2vec2's tokenizers have a special token between words, SentencePiece's a mark before them.
    """
    if token == getattr(tokenizer, "word_delimiter_token_id", None):
        return " "
    if token in tokenizer.all_special_ids:
        return ""
    spelling: str = tokenizer.convert_ids_to_tokens(token)
    return spelling.replace("▁", " ")


def timed_segments(
    timed: Sequence[TimedToken],
    avg_logprob: float,
    text_of: Callable[[list[int]], str],
    spelling: Callable[[int], str] | None,
) -> list[TimedSegment]:
    """Return segments of the tokens, cut at pauses in speech; those without text are left out.

    spelling: of each token, if words are to be timed.
    """
    found = []
    for part in _split(timed):
        tokens = [one.token for one in part]
        if not (text := text_of(tokens).strip()):
            continue
        text = " " + text
        found.append(
            TimedSegment(
                text,
                part[0].start,
                part[-1].end,
                tokens,
                _words(part, spelling) if spelling is not None else [],
                avg_logprob,
                0.0,
                0.0,
                text_compression(text),
                [one.logprob for one in part],
            )
        )
    return found


def _words(timed: Sequence[TimedToken], spelling: Callable[[int], str]) -> list[Word]:
    builder = WordBuilder(spelling)
    for one in timed:
        builder.add(one)
    return builder.words


def _split(timed: Sequence[TimedToken]) -> list[list[TimedToken]]:
    runs: list[list[TimedToken]] = []
    for entry in timed:
        if runs and entry.start - runs[-1][-1].end < _SEGMENT_PAUSE:
            runs[-1].append(entry)
        else:
            runs.append([entry])
    return runs
