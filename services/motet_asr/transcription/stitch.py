"""Join the texts of two overlapping windows so that each word occurs once.

Both windows cover the overlap, but words at its edges may be cut. Words that occur in both are
matched, in order and by time, and the texts are joined after the match nearest to the middle.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from motet_asr.engine.request import TimedSegment, Word

_TOLERANCE = 1.0  # seconds by which two windows may disagree about a word's time


def join(
    left: list[TimedSegment], right: list[TimedSegment], start: float, end: float
) -> tuple[list[TimedSegment], list[TimedSegment]]:
    """Return the segments of two windows such that each word of their overlap is kept once.

    `start`, `end`: of the overlap, in seconds.
    """
    before = [word for segment in left for word in segment.words]
    after = [word for segment in right for word in segment.words]
    keep, skip = seam(before, after, start, end)
    return _keep_words(left, keep), _drop_words(right, skip)


def seam(left: Sequence[Word], right: Sequence[Word], start: float, end: float) -> tuple[int, int]:
    """Return how many words of `left` to keep and how many of `right` to drop."""
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
    """Return pairs of equal words in order: the alignment with the best agreement in time."""
    best = [[0.0] * (len(right) + 1) for _ in range(len(left) + 1)]
    for i in range(len(left) - 1, -1, -1):
        for j in range(len(right) - 1, -1, -1):
            similarity = _similarity(left[i], right[j])
            matched = similarity + best[i + 1][j + 1] if similarity > 0 else 0.0
            best[i][j] = max(matched, best[i + 1][j], best[i][j + 1])
    pairs, i, j = [], 0, 0
    while i < len(left) and j < len(right):
        similarity = _similarity(left[i], right[j])
        if similarity > 0 and best[i][j] == similarity + best[i + 1][j + 1]:
            pairs.append((i, j))
            i, j = i + 1, j + 1
        elif best[i][j] == best[i + 1][j]:
            i += 1
        else:
            j += 1
    return pairs


def _similarity(one: Word, other: Word) -> float:
    if normalized(one.text) != normalized(other.text):
        return 0.0
    return max(0.0, 1.0 - abs(_centre(one) - _centre(other)) / _TOLERANCE)


def normalized(text: str) -> str:
    """Return a word without case and punctuation, about which two windows often disagree."""
    letters = "".join(char for char in text.casefold() if char.isalnum())
    return letters or text.strip()


def _centre(word: Word) -> float:
    return (word.start + word.end) / 2


def _keep_words(segments: list[TimedSegment], count: int) -> list[TimedSegment]:
    kept: list[TimedSegment] = []
    for segment in segments:
        if len(segment.words) <= count:
            kept.append(segment)
        elif count > 0:
            kept.append(_with_words(segment, segment.words[:count]))
        count = max(0, count - len(segment.words))
    return kept


def _drop_words(segments: list[TimedSegment], count: int) -> list[TimedSegment]:
    kept: list[TimedSegment] = []
    for segment in segments:
        if count <= 0:
            kept.append(segment)
        elif count < len(segment.words):
            kept.append(_with_words(segment, segment.words[count:]))
        count = max(0, count - len(segment.words))
    return kept


def _with_words(segment: TimedSegment, words: list[Word]) -> TimedSegment:
    """Return a segment with only some of its words.

    Its token ids stay those of the whole segment, since they cannot be assigned to words.
    """
    text = "".join(word.text for word in words)
    return replace(segment, text=text, words=words, start=words[0].start, end=words[-1].end)
