"""Quantiles by nearest rank: always one of the values, so that a p95 is a time that somebody waited."""

from __future__ import annotations

import math
from collections.abc import Iterable

_ROUNDING = 1e-9  # of a product such as 100 * 0.55, which comes out a little above 55


def quantile(values: Iterable[float], share: float) -> float:
    """The smallest value that at least `share` of all (0 to 1) do not exceed. ValueError without values."""
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values have no quantile: ask where there is one at the least")
    return ordered[max(math.ceil(len(ordered) * share - _ROUNDING), 1) - 1]
