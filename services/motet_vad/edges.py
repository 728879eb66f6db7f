"""From probabilities to turns: what `server_vad` of the realtime API promises, in milliseconds of audio.

* Speech starts with the first frame that reaches `threshold`. The start that is told lies `prefix_padding_ms` earlier,
  but never before the last stop.
* It stops when no frame has reached `threshold` for `silence_duration_ms`, counted from the first frame that was
  clearly below it (by a margin, so that a breath does not end a word). The stop that is told includes that silence.
* With `pause_ms`, silence within a turn that has lasted so long is a pause, and speech after it resumes the turn. As
  long as the turn lasts it is told how far it was heard: every frame of a pause, every `PROGRESS` ms of speech.
* When nobody has spoken for `idle_timeout_ms`, counted from the beginning, the last stop or the last such notice, that
  is an edge too.
"""

from __future__ import annotations

from motet_shared.errors import BadRequest
from motet_shared.messages import Detect, SpeechEdge

MARGIN = 0.15  # below the threshold: clearly silence
LONGEST = 60_000  # ms
PROGRESS = 96  # ms


class Edges:
    """The state of one stream between its frames."""

    def __init__(self, request: Detect):
        check(request)
        self.request = request
        self._low = max(request.threshold - MARGIN, request.threshold / 2)
        self._speaking = False
        self._quiet_from: int | None = None  # while speaking: where the silence began that may end it
        self._paused = False  # that silence was told
        self._heard = 0  # how far the turn was heard when that was told last
        self._floor = 0  # no start is told before it
        self._idle_from = 0

    @property
    def speaking(self) -> bool:
        return self._speaking

    def frame(self, probability: float, start: int, end: int) -> SpeechEdge | None:
        """The next frame, from `start` to `end` in ms, and the edge that it makes."""
        if self._speaking:
            return self._while_speaking(probability, start, end)
        if probability >= self.request.threshold:
            self._speaking, self._quiet_from, self._heard = True, None, end
            padded = max(self._floor, start - self.request.prefix_padding_ms)
            return SpeechEdge("start", padded, start, end)
        timeout = self.request.idle_timeout_ms
        if timeout is not None and end - self._idle_from >= timeout:
            began, self._idle_from = self._idle_from, self._idle_from + timeout
            return SpeechEdge("idle", self._idle_from, began, end)
        return None

    def _while_speaking(self, probability: float, start: int, end: int) -> SpeechEdge | None:
        if probability >= self.request.threshold:
            self._quiet_from = None
        elif probability < self._low and self._quiet_from is None:
            self._quiet_from = start
        silence = self.request.silence_duration_ms
        if self._quiet_from is not None and end - self._quiet_from >= silence:
            return self._stop(self._quiet_from + silence, self._quiet_from, end)
        return None if self.request.pause_ms is None else self._within(self.request.pause_ms, start, end)

    def _within(self, pause: int, start: int, end: int) -> SpeechEdge | None:
        """What there is to tell of a turn that goes on."""
        quiet_from, before = self._quiet_from, self._heard
        if self._paused and quiet_from is None:
            self._paused, self._heard = False, end
            return SpeechEdge("resume", start, start, end)
        if not self._paused and quiet_from is not None and end - quiet_from >= pause:
            self._paused, self._heard = True, end
            return SpeechEdge("pause", quiet_from + pause, quiet_from, end)
        if not self._paused and end - before < PROGRESS:
            return None
        self._heard = end
        return SpeechEdge("heard", end, end if quiet_from is None else quiet_from, end)

    def finish(self, end: int) -> SpeechEdge | None:
        """The audio is over at `end`: speech that has not stopped stops here."""
        if not self._speaking:
            return None
        return self._stop(end, end if self._quiet_from is None else self._quiet_from, end)

    def _stop(self, told: int, speech: int, heard: int) -> SpeechEdge:
        self._speaking = self._paused = False
        self._floor = self._idle_from = told
        return SpeechEdge("stop", told, speech, heard)


def check(request: Detect) -> None:
    """BadRequest names the field that is out of bounds."""
    if not 0 <= request.threshold <= 1:
        raise BadRequest(f"threshold: {request.threshold} is not between 0 and 1", param="threshold")
    for name, low in (("prefix_padding_ms", 0), ("silence_duration_ms", 0), ("pause_ms", 0), ("idle_timeout_ms", 1)):
        value = getattr(request, name)
        if value is not None and not low <= value <= LONGEST:
            raise BadRequest(f"{name}: {value} is not between {low} and {LONGEST} ms", param=name)
