"""Where a long recording is cut: in silence where there is some, else with an overlap that is stitched later.

Every sample is in some window, except where a whole window is silent. The rule is energy alone; anything that marks
speech (a VAD) may take its place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from .engine import SAMPLE_RATE, Audio

FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_FLOOR = -65.0  # dB of full scale: quieter than any speech
_PAUSE = 0.26  # seconds of quiet that a cut may fall into
_OVERLAP = 4.0  # seconds shared by two windows where nobody pauses
_EARLIEST = 0.4  # of the longest window: no cut before that

Speech = Callable[[Audio], Any]  # audio → a bool per FRAME


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
    padded = np.pad(audio, (0, -len(audio) % FRAME)).reshape(-1, FRAME)
    return 10 * np.log10(np.mean(np.square(padded, dtype=np.float64), axis=1) + 1e-12)


def is_silent(audio: Audio) -> bool:
    """Whether nothing in it could be speech."""
    return bool((levels(audio) <= _FLOOR).all())


def loud(audio: Audio) -> Any:
    """Which frames are louder than the pauses of this recording."""
    level = levels(audio)
    low, high = np.percentile(level, (10, 95))
    return level > max(_FLOOR, low + 0.3 * (high - low))


def cut(audio: Audio, longest: float, speech: Speech = loud) -> list[Window]:
    """Windows of at most `longest` seconds that cover the recording, in order."""
    talks, silent = speech(audio), levels(audio) <= _FLOOR
    total = len(audio) / SAMPLE_RATE
    overlap = min(_OVERLAP, longest / 4)
    windows: list[Window] = []
    start = shared = 0.0
    while True:
        if total - start <= longest:
            end, ahead = total, 0.0
        else:
            pause = _pause(talks, start + longest * _EARLIEST, start + longest)
            end, ahead = (pause, 0.0) if pause is not None else (start + longest, overlap)
        windows.append(Window(len(windows), start, end, shared, bool(silent[_frame(start) : _frame(end) + 1].all())))
        if end >= total:
            return windows
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
