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
SURE = 0.7  # seconds; a shorter window does not form a speaker of its own
# Total seconds; a speaker with less is merged into the nearest one, unless the voices differ much.
BRIEF = 2.0
LENIENT = 0.2  # by how much the cosine threshold is lowered for that merge

Span = tuple[float, float]


class Turn(NamedTuple):
    """Turn of one speaker (a number) from `start` to `end`, in seconds."""

    who: int
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


def turns(speech: Sequence[Span], vectors: Sequence[Vector], alike: float) -> list[Turn]:
    """Return the turns of `speech`; `vectors` are those of its `windows`.

    Blocks: run it in a thread.
    """
    heard = windows(speech)
    if not heard:
        return []
    labels = _smooth(heard, _labels(heard, vectors, alike))
    found: list[Turn] = []
    for (start, end), who in zip(heard, labels, strict=True):
        if (
            found and found[-1].end > start
        ):  # overlapping windows of one span: set the boundary half-way
            middle = (found[-1].end + start) / 2
            found[-1] = found[-1]._replace(end=middle)
            start = middle
        if found and found[-1].end == start and found[-1].who == who:
            found[-1] = found[-1]._replace(end=end)
        else:
            found.append(Turn(who, start, end))
    return found


def _labels(heard: Sequence[Span], vectors: Sequence[Vector], alike: float) -> list[int]:
    """Return a speaker per window. Short windows join the nearest speaker formed by longer ones."""
    seconds = [end - start for start, end in heard]
    sure = [index for index, length in enumerate(seconds) if length >= SURE] or list(
        range(len(heard))
    )
    found = cluster([vectors[i] for i in sure], [seconds[i] for i in sure], alike)
    labels = dict(zip(sure, _without_brief(found, sure, seconds, vectors, alike), strict=True))
    names = sorted(set(labels.values()))
    centres = [_centre(name, labels, seconds, vectors) for name in names]
    return [
        labels[i] if i in labels else names[nearest(vectors[i], centres)[0]]
        for i in range(len(heard))
    ]


def _centre(
    who: int, labels: dict[int, int], seconds: Sequence[float], vectors: Sequence[Vector]
) -> list[float]:
    own = [index for index, label in labels.items() if label == who]
    return mean([vectors[i] for i in own], [seconds[i] for i in own])


def _without_brief(
    found: list[int],
    places: list[int],
    seconds: Sequence[float],
    vectors: Sequence[Vector],
    alike: float,
) -> list[int]:
    """Merge speakers with little speech into the one that their voice is nearest to."""
    labels = dict(zip(places, found, strict=True))
    length: dict[int, float] = {}
    for index, who in labels.items():
        length[who] = length.get(who, 0.0) + seconds[index]
    steady = [who for who, total in length.items() if total >= BRIEF]
    if not steady:
        return found
    centres = {who: _centre(who, labels, seconds, vectors) for who in length}
    moved = {}
    for who in length.keys() - set(steady):
        best, closeness = nearest(centres[who], [centres[other] for other in steady])
        moved[who] = steady[best] if closeness >= alike - LENIENT else who
    return [moved.get(who, who) for who in found]


def _smooth(heard: Sequence[Span], labels: list[int]) -> list[int]:
    """Give a window between overlapping ones of one other speaker to that speaker."""
    found = list(labels)
    for i in range(1, len(found) - 1):
        joined = heard[i - 1][1] > heard[i][0] and heard[i][1] > heard[i + 1][0]
        if joined and found[i - 1] == labels[i + 1] != found[i]:
            found[i] = labels[i + 1]
    return found


def identify(
    found: Sequence[Turn],
    speech: Sequence[Span],
    vectors: Sequence[Vector],
    known: Sequence[Known],
    alike: float,
) -> dict[int, str]:
    """Return the names of the speakers whose voice matches a known one."""
    if not known:
        return {}
    own: dict[int, list[int]] = {}
    heard = windows(speech)
    for index, (start, end) in enumerate(heard):
        own.setdefault(who_says(found, start, end), []).append(index)
    names = {}
    for who, places in own.items():
        centre = mean([vectors[i] for i in places], [heard[i][1] - heard[i][0] for i in places])
        best, closeness = nearest(centre, [one.vector for one in known])
        if closeness >= alike:
            names[who] = known[best].name
    return names


def who_says(found: Sequence[Turn], start: float, end: float) -> int:
    """Return the speaker with most speech in an interval, else the nearest; 0 without turns.

    `found` is in order of time.
    """
    first = bisect_right(found, start, key=lambda turn: turn.end)
    shares: dict[int, float] = {}
    for turn in found[first:]:
        if turn.start >= end:
            break
        shares[turn.who] = shares.get(turn.who, 0.0) + min(end, turn.end) - max(start, turn.start)
    if shares:
        return max(shares, key=shares.__getitem__)
    around = found[max(0, first - 1) : first + 1]
    return (
        min(around, key=lambda turn: max(turn.start - end, start - turn.end)).who if around else 0
    )
