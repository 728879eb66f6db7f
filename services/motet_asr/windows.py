"""Where a long recording is cut: in silence where there is some, else with an overlap that is stitched later.

Every sample is in some window; a window in which nobody speaks is silent and need not be heard. Who speaks when is told
by the level alone, or by somebody who knows better (a VAD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from motet_shared.errors import BadRequest

from .engine import SAMPLE_RATE, Audio

FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_FLOOR = -65.0  # dB of full scale: quieter than any speech
_PAUSE = 0.26  # seconds of quiet that a cut may fall into
_OVERLAP = 4.0  # seconds shared by two windows where nobody pauses
_EARLIEST = 0.4  # of the longest window: no cut before that
_LONG = 3.0  # seconds: a silence that is worth a window less or more
_MARGIN = 0.4  # seconds around marked speech that are heard too: it may begin and end more softly


class Marks(NamedTuple):
    """Of each FRAME of a recording: whether somebody talks, so that no cut falls there; whether it may go unheard."""

    talks: Any
    empty: Any


Speech = Callable[[Audio], Marks]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the recording, seconds. `overlap`: how much of its beginning the window before it has heard too."""

    index: int
    start: float
    end: float
    overlap: float = 0.0
    silent: bool = False

    @property
    def seconds(self) -> float:
        return self.end - self.start

    def of(self, audio: Audio) -> Audio:
        return audio[round(self.start * SAMPLE_RATE) : round(self.end * SAMPLE_RATE)]


def levels(audio: Audio) -> Any:
    """Level of every frame, the last part of one included, dB of full scale."""
    whole = len(audio) // FRAME * FRAME
    frames, rest = audio[:whole].reshape(-1, FRAME), np.square(audio[whole:], dtype=np.float64)
    power = np.einsum("nk,nk->n", frames, frames, dtype=np.float64)  # without a copy in float64 of hours of sound
    power = np.append(power, [rest.sum()] * bool(len(rest)))
    return 10 * np.log10(power / FRAME + 1e-12)


def is_silent(audio: Audio) -> bool:
    """Whether nothing in it could be speech."""
    return bool((levels(audio) <= _FLOOR).all())


def loud(audio: Audio) -> Marks:
    """By the level: talk is louder than the pauses of this recording."""
    level = levels(audio)
    low, high = np.percentile(level, (10, 95))
    return Marks(level > max(_FLOOR, low + 0.3 * (high - low)), level <= _FLOOR)


def spoken(spans: Sequence[tuple[float, float]]) -> Speech:
    """By those who have listened: `spans` of speech, in seconds. BadRequest for what is no span."""
    for start, end in spans:
        if not 0 <= start <= end < np.inf:
            raise BadRequest(f"speech: ({start}, {end}) is no span; give seconds, the beginning first", param="speech")

    def marks(audio: Audio) -> Marks:
        count = -(-len(audio) // FRAME)
        talks, near = np.zeros(count, bool), np.zeros(count, bool)
        for start, end in spans:
            talks[_frame(start) : _frame(end) + 1] = True
            near[max(0, _frame(start - _MARGIN)) : _frame(end + _MARGIN) + 1] = True
        return Marks(talks, ~near)

    return marks


def cut(audio: Audio, longest: float, speech: Speech = loud) -> list[Window]:
    """Windows that cover the recording, in order; those that are to be heard last at most `longest` seconds."""
    marks = speech(audio)
    windows: list[Window] = []
    for start, end, silent in _stretches(marks.empty, len(audio) / SAMPLE_RATE):
        if silent:
            windows.append(Window(len(windows), start, end, silent=True))
        else:
            _cut(windows, marks, start, end, longest)
    return windows


def _stretches(empty: Any, total: float) -> Iterator[tuple[float, float, bool]]:
    """(start, end, whether it is a long silence), seconds: all of the recording, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], empty, [False]]).astype(np.int8)))
    seconds = [min(edge * FRAME / SAMPLE_RATE, total) for edge in edges.tolist()]
    now = 0.0
    for start, end in zip(seconds[::2], seconds[1::2], strict=True):
        if end - start >= _LONG:
            if start > now:
                yield now, start, False
            yield start, end, True
            now = end
    if now < total:
        yield now, total, False


def _cut(windows: list[Window], marks: Marks, start: float, total: float, longest: float) -> None:
    """Add the windows of a stretch without long silences."""
    overlap, shared = min(_OVERLAP, longest / 4), 0.0
    while True:
        if total - start <= longest:
            end, ahead = total, 0.0
        else:
            pause = _pause(marks.talks, start + longest * _EARLIEST, start + longest)
            end, ahead = (pause, 0.0) if pause is not None else (start + longest, overlap)
        silent = bool(marks.empty[_frame(start) : _frame(end) + 1].all())
        windows.append(Window(len(windows), start, end, shared, silent))
        if end >= total:
            return
        start, shared = end - ahead, ahead


def _frame(seconds: float) -> int:
    return int(seconds * SAMPLE_RATE / FRAME)


def _pause(talks: Any, earliest: float, latest: float) -> float | None:
    """The middle of the longest pause between two moments, the last of equals; None if none is long enough."""
    first, last = _frame(earliest), min(_frame(latest), len(talks))
    best, best_length, begin = None, _PAUSE * SAMPLE_RATE / FRAME, first
    for index in range(first, last + 1):
        if index < last and not talks[index]:
            continue
        if index - begin >= best_length:
            best, best_length = (begin + index) / 2, index - begin
        begin = index + 1
    return None if best is None else best * FRAME / SAMPLE_RATE
