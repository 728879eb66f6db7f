"""Fit a line through measurements over time, with a confidence interval of its slope."""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from motet_shared.quantiles import quantile

_Z = 1.96  # of a normal distribution, 95 %


@dataclass(frozen=True)
class Slope:
    """Hold a slope per unit of time, and its 95 % confidence interval."""

    value: float
    low: float
    high: float


def slope(times: Sequence[float], values: Sequence[float]) -> Slope:
    """Return the least-squares slope of values over times.

    The interval assumes independent errors; with fewer than three points it is unbounded.
    """
    middle, mean = statistics.fmean(times), statistics.fmean(values)
    spread = sum((time - middle) ** 2 for time in times)
    if len(times) < 3 or not spread:
        return Slope(0.0, -math.inf, math.inf)
    pairs = list(zip(times, values, strict=True))
    value = sum((time - middle) * (one - mean) for time, one in pairs) / spread
    rest = sum((one - mean - value * (time - middle)) ** 2 for time, one in pairs)
    freedom = len(times) - 2
    # Student's t by its expansion around the normal quantile.
    t = _Z + (_Z**3 + _Z) / (4 * freedom)
    error = t * math.sqrt(rest / freedom / spread)
    return Slope(value, value - error, value + error)


def ratio_interval(
    first: Sequence[float], last: Sequence[float], share: float, *, draws: int = 1000
) -> Slope:
    """Return the ratio of a quantile of `last` to that of `first`, with a bootstrap interval of 95 %."""
    rng = random.Random(0)
    ratios = sorted(
        quantile(rng.choices(last, k=len(last)), share)
        / quantile(rng.choices(first, k=len(first)), share)
        for _ in range(draws)
    )
    value = quantile(last, share) / quantile(first, share)
    return Slope(value, ratios[draws // 40], ratios[-1 - draws // 40])
