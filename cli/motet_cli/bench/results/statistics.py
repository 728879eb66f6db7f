"""Compute percentiles."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

SHARES = (50, 90, 95, 99)


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Distribution of values, in their own unit. With `count` 0 all else is 0."""

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
    """Return a percentile of sorted values, `share` from 0 to 100; linear interpolation as numpy's.

    Raises ValueError without values.
    """
    if not ordered:
        raise ValueError("no values have no percentile")
    place = (len(ordered) - 1) * share / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)
