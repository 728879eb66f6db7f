"""Derive speech edges from probabilities, as `server_vad` of the realtime API defines them.

All times are milliseconds of audio.

* Speech starts with the first frame that reaches `threshold`. The reported start is
  `prefix_padding_ms` earlier, but never before the last stop.
* It stops when no frame has reached `threshold` for `silence_duration_ms`, counted from the first
  frame that was below it by SILENCE_MARGIN (hysteresis: a breath does not end a word). The reported
  stop includes that silence.
* With `pause_ms`, silence within a turn that has lasted so long is a pause, and speech after it
  resumes the turn. While the turn lasts its progress is reported: every frame of a pause, every
  PROGRESS_MS of speech.
* When there is no speech for `idle_timeout_ms`, counted from the beginning, the last stop or the
  last idle edge, an idle edge is reported.
"""

from __future__ import annotations

from motet_shared.errors import BadRequest
from motet_shared.messages import Detect, SpeechEdge

SILENCE_MARGIN = 0.15  # probability below the threshold that counts as silence
MAX_DURATION_MS = 60_000  # ms; upper bound of all durations
PROGRESS_MS = 96  # ms


class Edges:
    """Track the speech state of one stream from frame to frame."""

    def __init__(self, request: Detect):
        check(request)
        self.request = request
        self._low = max(request.threshold - SILENCE_MARGIN, request.threshold / 2)
        self._speaking = False
        self._silence_start: int | None = (
            None  # while speaking: start of the silence that may end it
        )
        self._paused = False  # whether that silence was reported as a pause
        self._reported_until = 0  # end of the last frame whose progress was reported
        self._earliest_start = 0  # earliest start that may be reported
        self._idle_from = 0

    @property
    def speaking(self) -> bool:
        """Return True between a start and its stop."""
        return self._speaking

    def frame(self, probability: float, start: int, end: int) -> SpeechEdge | None:
        """Process the next frame, from `start` to `end` in ms; return the edge that it causes."""
        if self._speaking:
            return self._while_speaking(probability, start, end)
        if probability >= self.request.threshold:
            self._speaking, self._silence_start, self._reported_until = True, None, end
            padded = max(self._earliest_start, start - self.request.prefix_padding_ms)
            return SpeechEdge("start", padded, start, end)
        timeout = self.request.idle_timeout_ms
        if timeout is not None and end - self._idle_from >= timeout:
            began, self._idle_from = self._idle_from, self._idle_from + timeout
            return SpeechEdge("idle", self._idle_from, began, end)
        return None

    def _while_speaking(self, probability: float, start: int, end: int) -> SpeechEdge | None:
        if probability >= self.request.threshold:
            self._silence_start = None
        elif probability < self._low and self._silence_start is None:
            self._silence_start = start
        silence = self.request.silence_duration_ms
        if self._silence_start is not None and end - self._silence_start >= silence:
            return self._stop(self._silence_start + silence, self._silence_start, end)
        return (
            None
            if self.request.pause_ms is None
            else self._within(self.request.pause_ms, start, end)
        )

    def _within(self, pause: int, start: int, end: int) -> SpeechEdge | None:
        """Return the edge to report while a turn goes on, if any."""
        silence_start, before = self._silence_start, self._reported_until
        if self._paused and silence_start is None:
            self._paused, self._reported_until = False, end
            return SpeechEdge("resume", start, start, end)
        if not self._paused and silence_start is not None and end - silence_start >= pause:
            self._paused, self._reported_until = True, end
            return SpeechEdge("pause", silence_start + pause, silence_start, end)
        if not self._paused and end - before < PROGRESS_MS:
            return None
        self._reported_until = end
        return SpeechEdge("heard", end, end if silence_start is None else silence_start, end)

    def finish(self, end: int) -> SpeechEdge | None:
        """Process the end of the audio at `end`: return the stop of a running turn, if any."""
        if not self._speaking:
            return None
        return self._stop(end, end if self._silence_start is None else self._silence_start, end)

    def _stop(self, end: int, speech: int, heard: int) -> SpeechEdge:
        self._speaking = self._paused = False
        self._earliest_start = self._idle_from = end
        return SpeechEdge("stop", end, speech, heard)


def check(request: Detect) -> None:
    """Raise BadRequest naming the field that is out of bounds."""
    if not 0 <= request.threshold <= 1:
        raise BadRequest(
            f"threshold: {request.threshold} is not between 0 and 1", param="threshold"
        )
    for name, low in (
        ("prefix_padding_ms", 0),
        ("silence_duration_ms", 0),
        ("pause_ms", 0),
        ("idle_timeout_ms", 1),
    ):
        value = getattr(request, name)
        if value is not None and not low <= value <= MAX_DURATION_MS:
            raise BadRequest(
                f"{name}: {value} is not between {low} and {MAX_DURATION_MS} ms", param=name
            )
