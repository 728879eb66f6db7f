"""Measure speech as a listener has it: first audio, real-time factor, underruns and continuity."""

from __future__ import annotations


class Playout:
    """Follow a listener who plays each byte as soon as it can, from the first audio on.

    Time is what `begin`, `receive`, `resume` and `end` are given, in seconds of one clock. A text
    that is still being written begins once for each sentence: silence before a sentence is the
    writer's, silence after it has begun is an underrun. Time between `receive` and `resume`, in
    which the caller reads nothing, does not count: its player is full.
    """

    __slots__ = (
        "_bytes",
        "_computing_since",
        "_per_second",
        "_plays_until",
        "_unread",
        "computed",
        "first_audio",
        "stalled",
        "underruns",
    )

    def __init__(self, bytes_per_second: int):
        self._per_second = bytes_per_second
        self._bytes = 0
        self._unread = 0.0  # seconds in which the caller read nothing
        self._computing_since: float | None = None
        self._plays_until: float | None = None  # on the clock without the unread time
        self.first_audio: float | None = None  # seconds from the first `begin`
        self.computed = 0.0  # seconds of waiting for audio
        self.underruns = 0  # times that a listener had nothing to play
        self.stalled = 0.0  # seconds of all underruns

    @property
    def seconds(self) -> float:
        """Return the seconds of audio that have arrived."""
        return self._bytes / self._per_second

    @property
    def realtime_factor(self) -> float | None:
        """Return seconds of waiting per second of audio; None without audio."""
        return self.computed / self.seconds if self._bytes else None

    @property
    def continuity(self) -> float | None:
        """Return the share of the listening time in which audio was heard; None without audio."""
        return self.seconds / (self.seconds + self.stalled) if self._bytes else None

    def begin(self, now: float) -> None:
        """Begin to wait for a text, or for one more sentence."""
        if self._plays_until is not None and now - self._unread > self._plays_until:
            self._plays_until = None
        self._computing_since = now

    def receive(self, count: int, now: float) -> None:
        """Note `count` more bytes of audio. Call `resume` before waiting for others."""
        self._wait(now)
        if not count:
            return
        heard = now - self._unread
        if self.first_audio is None:
            self.first_audio = self.computed
        if self._plays_until is None:
            self._plays_until = heard
        elif heard > self._plays_until:
            self.underruns += 1
            self.stalled += heard - self._plays_until
            self._plays_until = heard
        self._bytes += count
        self._plays_until += count / self._per_second

    def resume(self, now: float) -> None:
        """Wait for audio again: the caller has taken what arrived."""
        if self._computing_since is not None:
            self._unread += now - self._computing_since
            self._computing_since = now

    def end(self, now: float) -> None:
        """Wait no more: the text, or a sentence, is complete."""
        self._wait(now)
        self._computing_since = None

    def _wait(self, now: float) -> None:
        if self._computing_since is not None:
            self.computed += now - self._computing_since
            self._computing_since = now
