"""Cut a long recording into windows: in silence where possible, else with an overlap to stitch.

Every sample is in some window; a window without speech is silent and need not be transcribed.
Speech is found by level alone, or given by the caller (from a VAD).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from motet_asr.engine.engine import SAMPLE_RATE, Audio
from motet_shared.errors import BadRequest

FRAME = SAMPLE_RATE // 50  # samples: 20 ms
_FLOOR = -65.0  # dB of full scale: quieter than any speech
_PAUSE = 0.26  # shortest pause that a cut may fall into, in seconds
_OVERLAP = 4.0  # seconds shared by two windows where there is no pause
_EARLIEST = 0.4  # of the longest window: no cut before that
_LONG = 3.0  # seconds: a silence that becomes a window of its own
_MARGIN = 0.4  # seconds around marked speech that count too: it may begin and end softly


class Marks(NamedTuple):
    """Flags of each FRAME of a recording.

    talks: speech, where no cut may fall.
    empty: no speech, so that it need not be transcribed.
    """

    talks: Any
    empty: Any


Speech = Callable[[Audio], Marks]


@dataclass(frozen=True, slots=True)
class Window:
    """A stretch of the recording, in seconds.

    `overlap`: how much of its beginning the previous window covers too.
    """

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
    """Return the level of every frame in dB of full scale, a partial last frame included."""
    whole = len(audio) // FRAME * FRAME
    frames, rest = audio[:whole].reshape(-1, FRAME), np.square(audio[whole:], dtype=np.float64)
    power = np.einsum(
        "nk,nk->n", frames, frames, dtype=np.float64
    )  # avoids a float64 copy of hours of audio
    power = np.append(power, [rest.sum()] * bool(len(rest)))
    return 10 * np.log10(power / FRAME + 1e-12)


def is_silent(audio: Audio) -> bool:
    """Return True if no frame is loud enough for speech."""
    return bool((levels(audio) <= _FLOOR).all())


def loud(audio: Audio) -> Marks:
    """Mark speech by level: it is louder than the pauses of this recording."""
    level = levels(audio)
    low, high = np.percentile(level, (10, 95))
    return Marks(level > max(_FLOOR, low + 0.3 * (high - low)), level <= _FLOOR)


def spoken(spans: Sequence[tuple[float, float]]) -> Speech:
    """Return a function that marks the given `spans` of speech, in seconds.

    Raises BadRequest if a span is not finite, negative, or ends before it begins.
    """
    for start, end in spans:
        if not 0 <= start <= end < np.inf:
            raise BadRequest(
                f"speech: ({start}, {end}) is no span; give seconds, the beginning first",
                param="speech",
            )

    def marks(audio: Audio) -> Marks:
        count = -(-len(audio) // FRAME)
        talks, near = np.zeros(count, bool), np.zeros(count, bool)
        for start, end in spans:
            talks[_frame(start) : _frame(end) + 1] = True
            near[max(0, _frame(start - _MARGIN)) : _frame(end + _MARGIN) + 1] = True
        return Marks(talks, ~near)

    return marks


def cut(audio: Audio, longest: float, speech: Speech = loud) -> list[Window]:
    """Return windows that cover the recording, in order.

    Those that are not silent last at most `longest` seconds.
    """
    marks = speech(audio)
    windows: list[Window] = []
    for start, end, silent in _stretches(marks.empty, len(audio) / SAMPLE_RATE):
        if silent:
            windows.append(Window(len(windows), start, end, silent=True))
        else:
            _cut(windows, marks, start, end, longest)
    return windows


def _stretches(empty: Any, total: float) -> Iterator[tuple[float, float, bool]]:
    """Yield (start, end, is a long silence), in seconds: all of the recording, in order."""
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
    """Return the middle of the longest pause between two moments, the last of equals, or None."""
    first, last = _frame(earliest), min(_frame(latest), len(talks))
    best, best_length, begin = None, _PAUSE * SAMPLE_RATE / FRAME, first
    for index in range(first, last + 1):
        if index < last and not talks[index]:
            continue
        if index - begin >= best_length:
            best, best_length = (begin + index) / 2, index - begin
        begin = index + 1
    return None if best is None else best * FRAME / SAMPLE_RATE
