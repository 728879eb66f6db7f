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
_SILENCE_DB = -65.0  # dB of full scale: quieter than any speech
_SHORTEST_PAUSE = 0.26  # shortest pause that a cut may fall into, in seconds
_OVERLAP = 4.0  # seconds shared by two windows where there is no pause
_EARLIEST_CUT = 0.4  # of the longest window: no cut before that
_LONG_SILENCE = 3.0  # seconds: a silence that becomes a window of its own
_MARGIN = 0.4  # seconds around marked speech that count too: it may begin and end softly


class SpeechFlags(NamedTuple):
    """Flag each FRAME of a recording.

    is_speech: speech, where no cut may fall.
    is_silence: no speech, so that it need not be transcribed.
    """

    is_speech: Any
    is_silence: Any


SpeechMarker = Callable[[Audio], SpeechFlags]


@dataclass(frozen=True, slots=True)
class Window:
    """Represent a stretch of the recording, in seconds.

    overlap: how much of its beginning the previous window covers too.
    silent: whether it has no speech.
    """

    index: int
    start: float
    end: float
    overlap: float = 0.0
    silent: bool = False

    @property
    def seconds(self) -> float:
        """Return the length of the window."""
        return self.end - self.start

    def of(self, audio: Audio) -> Audio:
        """Return the window's samples."""
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
    return bool((levels(audio) <= _SILENCE_DB).all())


def mark_by_level(audio: Audio) -> SpeechFlags:
    """Mark speech by level: it is louder than the pauses of this recording."""
    level = levels(audio)
    low, high = np.percentile(level, (10, 95))
    return SpeechFlags(level > max(_SILENCE_DB, low + 0.3 * (high - low)), level <= _SILENCE_DB)


def mark_spans(spans: Sequence[tuple[float, float]]) -> SpeechMarker:
    """Return a function that marks the given `spans` of speech, in seconds.

    Raises BadRequest if a span is not finite, negative, or ends before it begins.
    """
    for start, end in spans:
        if not 0 <= start <= end < np.inf:
            raise BadRequest(
                f"speech: ({start}, {end}) is no span; give (start, end) in seconds",
                param="speech",
            )

    def mark(audio: Audio) -> SpeechFlags:
        count = -(-len(audio) // FRAME)
        is_speech, is_near_speech = np.zeros(count, bool), np.zeros(count, bool)
        behind = len(audio) / SAMPLE_RATE + 2 * _MARGIN  # no frame of it is near what comes later
        for span in spans:
            start, end = (min(seconds, behind) for seconds in span)
            is_speech[_frame(start) : _frame(end) + 1] = True
            is_near_speech[max(0, _frame(start - _MARGIN)) : _frame(end + _MARGIN) + 1] = True
        return SpeechFlags(is_speech, ~is_near_speech)

    return mark


def cut(audio: Audio, longest: float, speech: SpeechMarker = mark_by_level) -> list[Window]:
    """Return windows that cover the recording, in order.

    Those that are not silent last at most `longest` seconds.
    """
    mark = speech(audio)
    windows: list[Window] = []
    for start, end, silent in _stretches(mark.is_silence, len(audio) / SAMPLE_RATE):
        if silent:
            windows.append(Window(len(windows), start, end, silent=True))
        else:
            _cut(windows, mark, start, end, longest)
    return windows


def _stretches(is_silence: Any, total: float) -> Iterator[tuple[float, float, bool]]:
    """Yield (start, end, is a long silence), in seconds: all of the recording, in order."""
    edges = np.flatnonzero(np.diff(np.concatenate([[False], is_silence, [False]]).astype(np.int8)))
    seconds = [min(edge * FRAME / SAMPLE_RATE, total) for edge in edges.tolist()]
    position = 0.0
    for start, end in zip(seconds[::2], seconds[1::2], strict=True):
        if end - start >= _LONG_SILENCE:
            if start > position:
                yield position, start, False
            yield start, end, True
            position = end
    if position < total:
        yield position, total, False


def _cut(
    windows: list[Window], mark: SpeechFlags, start: float, total: float, longest: float
) -> None:
    """Add the windows of a stretch without long silences."""
    overlap, overlap_before = min(_OVERLAP, longest / 4), 0.0
    while True:
        if total - start <= longest:
            end, next_overlap = total, 0.0
        else:
            pause = _pause(mark.is_speech, start + longest * _EARLIEST_CUT, start + longest)
            end, next_overlap = (pause, 0.0) if pause is not None else (start + longest, overlap)
        silent = bool(mark.is_silence[_frame(start) : _frame(end) + 1].all())
        windows.append(Window(len(windows), start, end, overlap_before, silent))
        if end >= total:
            return
        start, overlap_before = end - next_overlap, next_overlap


def _frame(seconds: float) -> int:
    return int(seconds * SAMPLE_RATE / FRAME)


def _pause(is_speech: Any, earliest: float, latest: float) -> float | None:
    """Return the middle of the longest pause between two moments, the last of equals, or None."""
    first, last = _frame(earliest), min(_frame(latest), len(is_speech))
    best, best_length, begin = None, _SHORTEST_PAUSE * SAMPLE_RATE / FRAME, first
    for index in range(first, last + 1):
        if index < last and not is_speech[index]:
            continue
        if index - begin >= best_length:
            best, best_length = (begin + index) / 2, index - begin
        begin = index + 1
    return None if best is None else best * FRAME / SAMPLE_RATE
