"""Diarize: cut speech into short windows, cluster their voice vectors, join clusters into turns.

This module calls no service; `diarized_transcript.py` does.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from typing import NamedTuple

from .clustering import Vector, cluster, mean, nearest

WINDOW, STEP = 1.6, 0.8  # seconds of a window, and from one window to the next
MIN_WINDOW = 0.7  # seconds; a shorter window does not form a speaker of its own
# Total seconds; a speaker with less is merged into the nearest one, unless the voices differ much.
MIN_SPEECH = 2.0
MERGE_MARGIN = 0.2  # by how much the cosine threshold is lowered for that merge

Span = tuple[float, float]


class Turn(NamedTuple):
    """Turn of one speaker (a number) from `start` to `end`, in seconds."""

    speaker: int
    start: float
    end: float


class Known(NamedTuple):
    """Speaker whose name and voice vector are given."""

    name: str
    vector: Vector


def windows(speech: Sequence[Span]) -> list[Span]:
    """Return the windows to compare, by start: spans of speech, long ones in overlapping parts."""
    found: list[Span] = []
    for start, end in speech:
        parts = max(1, math.ceil((end - start - WINDOW) / STEP) + 1)
        length = min(WINDOW, end - start)
        step = (end - start - length) / max(1, parts - 1)
        found += [(start + part * step, start + part * step + length) for part in range(parts)]
    return found


def turns(speech: Sequence[Span], vectors: Sequence[Vector], threshold: float) -> list[Turn]:
    """Return the turns of `speech`; `vectors` are those of its `windows`.

    Blocks: run it in a thread.
    """
    spans = windows(speech)
    if not spans:
        return []
    labels = _smooth(spans, _labels(spans, vectors, threshold))
    found: list[Turn] = []
    for (start, end), speaker in zip(spans, labels, strict=True):
        if (
            found and found[-1].end > start
        ):  # overlapping windows of one span: set the boundary half-way
            middle = (found[-1].end + start) / 2
            found[-1] = found[-1]._replace(end=middle)
            start = middle
        if found and found[-1].end == start and found[-1].speaker == speaker:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(Turn(speaker, start, end))
    return found


def _labels(spans: Sequence[Span], vectors: Sequence[Vector], threshold: float) -> list[int]:
    """Return a speaker per window. Short windows join the nearest speaker formed by longer ones."""
    seconds = [end - start for start, end in spans]
    long_windows = [index for index, length in enumerate(seconds) if length >= MIN_WINDOW] or list(
        range(len(spans))
    )
    found = cluster(
        [vectors[i] for i in long_windows], [seconds[i] for i in long_windows], threshold
    )
    labels = dict(
        zip(
            long_windows,
            _merge_brief(found, long_windows, seconds, vectors, threshold),
            strict=True,
        )
    )
    names = sorted(set(labels.values()))
    centres = [_centre(name, labels, seconds, vectors) for name in names]
    return [
        labels[i] if i in labels else names[nearest(vectors[i], centres)[0]]
        for i in range(len(spans))
    ]


def _centre(
    speaker: int, labels: dict[int, int], seconds: Sequence[float], vectors: Sequence[Vector]
) -> list[float]:
    own = [index for index, label in labels.items() if label == speaker]
    return mean([vectors[i] for i in own], [seconds[i] for i in own])


def _merge_brief(
    found: list[int],
    indices: list[int],
    seconds: Sequence[float],
    vectors: Sequence[Vector],
    threshold: float,
) -> list[int]:
    """Merge speakers with little speech into the one that their voice is nearest to."""
    labels = dict(zip(indices, found, strict=True))
    length: dict[int, float] = {}
    for index, speaker in labels.items():
        length[speaker] = length.get(speaker, 0.0) + seconds[index]
    lasting = [speaker for speaker, total in length.items() if total >= MIN_SPEECH]
    if not lasting:
        return found
    centres = {speaker: _centre(speaker, labels, seconds, vectors) for speaker in length}
    moved = {}
    for speaker in length.keys() - set(lasting):
        best, similarity = nearest(centres[speaker], [centres[other] for other in lasting])
        moved[speaker] = lasting[best] if similarity >= threshold - MERGE_MARGIN else speaker
    return [moved.get(speaker, speaker) for speaker in found]


def _smooth(spans: Sequence[Span], labels: list[int]) -> list[int]:
    """Give a window between overlapping ones of one other speaker to that speaker."""
    found = list(labels)
    for i in range(1, len(found) - 1):
        joined = spans[i - 1][1] > spans[i][0] and spans[i][1] > spans[i + 1][0]
        if joined and found[i - 1] == labels[i + 1] != found[i]:
            found[i] = labels[i + 1]
    return found


def identify(
    found: Sequence[Turn],
    speech: Sequence[Span],
    vectors: Sequence[Vector],
    known: Sequence[Known],
    threshold: float,
) -> dict[int, str]:
    """Return the names of the speakers whose voice matches a known one."""
    if not known:
        return {}
    own: dict[int, list[int]] = {}
    spans = windows(speech)
    for index, (start, end) in enumerate(spans):
        own.setdefault(speaker_at(found, start, end), []).append(index)
    names = {}
    for speaker, indices in own.items():
        centre = mean([vectors[i] for i in indices], [spans[i][1] - spans[i][0] for i in indices])
        best, similarity = nearest(centre, [one.vector for one in known])
        if similarity >= threshold:
            names[speaker] = known[best].name
    return names


def speaker_at(found: Sequence[Turn], start: float, end: float) -> int:
    """Return the speaker with most speech in an interval, else the nearest; 0 without turns.

    `found` is in order of time.
    """
    first = bisect_right(found, start, key=lambda turn: turn.end)
    overlaps: dict[int, float] = {}
    for turn in found[first:]:
        if turn.start >= end:
            break
        overlaps[turn.speaker] = (
            overlaps.get(turn.speaker, 0.0) + min(end, turn.end) - max(start, turn.start)
        )
    if overlaps:
        return max(overlaps, key=overlaps.__getitem__)
    around = found[max(0, first - 1) : first + 1]
    return (
        min(around, key=lambda turn: max(turn.start - end, start - turn.end)).speaker
        if around
        else 0
    )
