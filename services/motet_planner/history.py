"""Keep recent samples of a role, and aggregate them over a time window."""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Hold one observation of a role.

    at: seconds of any monotonic clock.
    arrivals, tokens: since the previous sample.
    running: requests in service.
    waiting: requests that wait, at an instance or for one.
    ready: instances that take work.
    starting: instances that do not take work yet.
    cold_start: measured seconds from asking for an instance until it is ready; 0: unknown.
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
        """Return the requests in service or waiting."""
        return self.running + self.waiting


@dataclass(frozen=True, slots=True)
class _Sums:
    """Sum all samples up to one."""

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
    """Keep the samples of at least the last `seconds`.

    Prefix sums and binary search: a query takes O(log n) of the number of samples.
    """

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._times: list[float] = []
        self._sums = [_Sums()]  # one more than `_times`: before the first sample, and after each

    def add(self, sample: Sample) -> None:
        """Add a sample. Raises ValueError for one that is not newer than the last."""
        if self._times and sample.at <= self._times[-1]:
            raise ValueError(
                f"at: a sample of {sample.at:g} s after one of {self._times[-1]:g} s; add samples in order"
            )
        self._times.append(sample.at)
        self._sums.append(self._sums[-1].with_(sample))
        # One sample before the window stays: it marks where the window's first sample begins.
        if (old := self._first(self.seconds) - 1) > len(self._times) / 2:
            del self._times[:old]
            del self._sums[:old]

    def outstanding(self, seconds: float) -> float:
        """Return the mean number of outstanding requests over the last `seconds`."""
        first = self._first(seconds)
        return (self._sums[-1].outstanding - self._sums[first].outstanding) / (
            len(self._times) - first
        )

    def has_requests(self, seconds: float) -> bool:
        """Return True if any request arrived or was outstanding in the last `seconds`."""
        now, then = self._sums[-1], self._sums[self._first(seconds)]
        return now.arrivals > then.arrivals or now.outstanding > then.outstanding

    def tokens(self, seconds: float) -> float:
        """Return the mean tokens per second over the last `seconds`."""
        first, length = self._measured_span(seconds)
        return (self._sums[-1].tokens - self._sums[first].tokens) / length if length else 0.0

    def forecast_running(self, seconds: float, horizon: float) -> float:
        """Forecast the requests in service after `horizon` more seconds.

        Arrivals are taken to grow on as over the last `seconds`. Growth is what the second half has
        more than the first, beyond two standard errors of a Poisson process: noise is not taken for
        a trend, nor is a fall; the rate is taken to double at most. The time in service of a
        request is taken to stay the same.
        """
        first, length = self._measured_span(seconds)
        running = (self._sums[-1].running - self._sums[first].running) / (len(self._times) - first)
        if self._sums[-1].arrivals == self._sums[first].arrivals or not length:
            return running
        middle = first + (len(self._times) - first) // 2
        if middle == first:
            return running
        (early, early_noise), (late, late_noise) = (
            self._rate(first, middle),
            self._rate(middle, len(self._times)),
        )
        # Per second squared: the increase from the middle of one half to the middle of the other.
        growth = max(0.0, late - early - 2 * (early_noise + late_noise) ** 0.5) / (length / 2)
        mean = (self._sums[-1].arrivals - self._sums[first].arrivals) / length
        ahead = min(mean + growth * (length / 2 + horizon), 2 * late) if growth else mean
        return running * ahead / mean

    def _rate(self, first: int, end: int) -> tuple[float, float]:
        """Return arrivals per second in samples `first` to `end`, and the variance of that rate.

        The variance is that of a Poisson process.
        """
        arrived = self._sums[end].arrivals - self._sums[first].arrivals
        length = self._times[end - 1] - self._times[first - 1]
        return arrived / length, arrived / length**2

    def _first(self, seconds: float) -> int:
        """Return the index of the first sample of the last `seconds`, at most the newest's."""
        return min(
            bisect_right(self._times, self._times[-1] - seconds + 1e-9), len(self._times) - 1
        )

    def _measured_span(self, seconds: float) -> tuple[int, float]:
        """Return the first sample whose distance to its predecessor is known, and the seconds.

        The seconds are those from that predecessor to the newest sample. Nothing is known of the
        time before the first sample of all; (0, 0.0) without two samples.
        """
        first = max(1, self._first(seconds))
        return (
            (first, self._times[-1] - self._times[first - 1])
            if first < len(self._times)
            else (0, 0.0)
        )
