"""What was seen of a role of late: samples of equal distance, and what they come to over a stretch of time."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One look at a role. `at`: seconds of any clock that never goes back.

    arrivals, tokens: that came since the sample before. running: requests in service; waiting: those that wait, at an
    instance or for one. ready: instances that take work; starting: those that are on their way.
    cold_start: seconds from asking for an instance until it is ready, as measured; 0: not yet.
    """

    at: float
    arrivals: int = 0
    running: float = 0.0
    waiting: float = 0.0
    tokens: float = 0.0
    ready: int = 0
    starting: int = 0
    cold_start: float = 0.0

    @property
    def outstanding(self) -> float:
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class _Sums:
    """Of all samples until one."""

    arrivals: int = 0
    tokens: float = 0.0
    running: float = 0.0
    outstanding: float = 0.0

    def with_(self, sample: Sample) -> _Sums:
        return _Sums(
            self.arrivals + sample.arrivals,
            self.tokens + sample.tokens,
            self.running + sample.running,
            self.outstanding + sample.outstanding,
        )


class History:
    """The samples of the last `seconds` at least. Each question takes the same time, however many there are."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._times: list[float] = []
        self._sums = [_Sums()]  # one more than times: before the first, and after each

    def add(self, sample: Sample) -> None:
        """ValueError for one that is not newer than the last."""
        if self._times and sample.at <= self._times[-1]:
            raise ValueError(f"a sample of {sample.at:g} s after one of {self._times[-1]:g} s: time goes back")
        self._times.append(sample.at)
        self._sums.append(self._sums[-1].with_(sample))
        # One before the window stays: it tells how long ago the window's first sample begins.
        if (old := self._first(self.seconds) - 1) > len(self._times) / 2:
            del self._times[:old]
            del self._sums[:old]

    def outstanding(self, seconds: float) -> float:
        """Requests at a time, on average over the last `seconds`."""
        first = self._first(seconds)
        return (self._sums[-1].outstanding - self._sums[first].outstanding) / (len(self._times) - first)

    def anybody(self, seconds: float) -> bool:
        """Whether any request came, or was there."""
        now, then = self._sums[-1], self._sums[self._first(seconds)]
        return now.arrivals > then.arrivals or now.outstanding > then.outstanding

    def tokens(self, seconds: float) -> float:
        """Tokens per second."""
        first, length = self._stretch(seconds)
        return (self._sums[-1].tokens - self._sums[first].tokens) / length if length else 0.0

    def running_ahead(self, seconds: float, horizon: float) -> float:
        """Requests in service after `horizon` more seconds, if arrivals go on to grow as over the last `seconds`.

        Growth is what the second half has more than the first, beyond two standard errors of a Poisson process: noise
        is not taken for a trend, nor is a fall; and the rate is taken to double at most. A request is taken to be in
        service for as long as now.
        """
        first, length = self._stretch(seconds)
        running = (self._sums[-1].running - self._sums[first].running) / (len(self._times) - first)
        if self._sums[-1].arrivals == self._sums[first].arrivals or not length:
            return running
        middle = first + (len(self._times) - first) // 2
        if middle == first:
            return running
        (early, early_noise), (late, late_noise) = self._rate(first, middle), self._rate(middle, len(self._times))
        # Per second, and second: so much more, from the middle of one half to that of the other.
        growth = max(0.0, late - early - 2 * (early_noise + late_noise) ** 0.5) / (length / 2)
        mean = (self._sums[-1].arrivals - self._sums[first].arrivals) / length
        ahead = min(mean + growth * (length / 2 + horizon), 2 * late) if growth else mean
        return running * ahead / mean

    def _rate(self, first: int, end: int) -> tuple[float, float]:
        """Arrivals per second in samples `first` to `end`, and the variance of that in a Poisson process."""
        arrived = self._sums[end].arrivals - self._sums[first].arrivals
        length = self._times[end - 1] - self._times[first - 1]
        return arrived / length, arrived / length**2

    def _first(self, seconds: float) -> int:
        """Index of the first sample of the last `seconds`; at least the newest is of them."""
        return min(bisect_right(self._times, self._times[-1] - seconds + 1e-9), len(self._times) - 1)

    def _stretch(self, seconds: float) -> tuple[int, float]:
        """The same of what came between two samples, and how long that is; nothing is known of before the first."""
        first = max(1, self._first(seconds))
        return (first, self._times[-1] - self._times[first - 1]) if first < len(self._times) else (0, 0.0)
