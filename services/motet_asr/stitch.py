"""One text from two that overlap: each word once.

Both windows have heard the overlap, but the words at its edges only in part. So the words that both have are matched,
in order and by time, and the texts are joined behind one of them, near the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from .request import Piece, Word

_TOLERANCE = 1.0  # seconds that two windows may disagree about when a word was said


def join(left: list[Piece], right: list[Piece], start: float, end: float) -> tuple[list[Piece], list[Piece]]:
    """What is left of two windows' pieces when each word of their overlap, `start` to `end`, is kept once."""
    before = [word for piece in left for word in piece.words]
    after = [word for piece in right for word in piece.words]
    keep, skip = seam(before, after, start, end)
    return _first_words(left, keep), _without_first_words(right, skip)


def seam(left: Sequence[Word], right: Sequence[Word], start: float, end: float) -> tuple[int, int]:
    """How many words of `left` to keep, and how many of `right` to leave out."""
    tail = [index for index, word in enumerate(left) if word.end > start]
    head = [index for index, word in enumerate(right) if word.start < end]
    if not tail or not head:
        return len(left), 0
    middle = (start + end) / 2
    matches = _matches([left[i] for i in tail], [right[j] for j in head])
    if matches:
        i, j = min(matches, key=lambda pair: abs(_centre(left[tail[pair[0]]]) - middle))
        return tail[i] + 1, head[j] + 1
    keep = sum(1 for word in left if _centre(word) < middle)
    skip = sum(1 for word in right if _centre(word) < middle)
    return keep, skip


def _matches(left: list[Word], right: list[Word]) -> list[tuple[int, int]]:
    """Pairs of equal words in order: those that agree best in number and in time."""
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            weight = _likeness(left[i], right[j])
            together = weight + best[i + 1][j + 1] if weight > 0 else 0.0
            best[i][j] = max(together, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        weight = _likeness(left[i], right[j])
        if weight > 0 and best[i][j] == weight + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _likeness(one: Word, other: Word) -> float:
    if plain(one.text) != plain(other.text):
        return 0.0
    return max(0.0, 1.0 - abs(_centre(one) - _centre(other)) / _TOLERANCE)


def plain(text: str) -> str:
    """A word without case and punctuation, of which two windows have different ideas."""
    letters = "".join(char for char in text.casefold() if char.isalnum())
    return letters or text.strip()


def _centre(word: Word) -> float:
    return (word.start + word.end) / 2


def _first_words(pieces: list[Piece], count: int) -> list[Piece]:
    kept: list[Piece] = []
    for piece in pieces:
        if len(piece.words) <= count:
            kept.append(piece)
        elif count > 0:
            kept.append(_with(piece, piece.words[:count]))
        count = max(0, count - len(piece.words))
    return kept


def _without_first_words(pieces: list[Piece], count: int) -> list[Piece]:
    kept: list[Piece] = []
    for piece in pieces:
        if count <= 0:
            kept.append(piece)
        elif count < len(piece.words):
            kept.append(_with(piece, piece.words[count:]))
        count = max(0, count - len(piece.words))
    return kept


def _with(piece: Piece, words: list[Word]) -> Piece:
    """A piece with only some of its words. Its token ids are those of the whole: nobody can tell them apart."""
    text = "".join(word.text for word in words)
    return replace(piece, text=text, words=words, start=words[0].start, end=words[-1].end)
