"""Compute percentiles and summarize distributions."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Summarize a distribution in the unit of its values; all 0 without values."""

    count: int = 0
    mean: float = 0.0
    min: float = 0.0
    p50: float = 0.0
    p90: float = 0.0
    p95: float = 0.0
    p99: float = 0.0
    max: float = 0.0

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        ordered = sorted(values)
        if not ordered:
            return cls()
        shares = {f"p{share}": percentile(ordered, share) for share in SHARES}
        mean = math.fsum(ordered) / len(ordered)
        return cls(count=len(ordered), mean=mean, min=ordered[0], max=ordered[-1], **shares)


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return a percentile of sorted values by linear interpolation, as numpy does.

    share: 0 to 100. Raises ValueError for an empty sequence.
    """
    if not ordered:
        raise ValueError("ordered: is empty; give at least one value")
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
