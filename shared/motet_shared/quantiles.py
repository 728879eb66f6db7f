"""Compute quantiles by nearest rank: the result is always one of the measured values."""

from __future__ import annotations

import math
from collections.abc import Iterable

_ROUNDING = 1e-9  # error of a product such as 100 * 0.55, which comes out a little above 55


def quantile(values: Iterable[float], share: float) -> float:
    """Return the smallest value that is at least `share` (0 to 1) of all values.

    Raises ValueError without values.
    """
    ordered = sorted(values)
    if not ordered:
        raise ValueError("no values have no quantile: ask where there is one at the least")
    return ordered[max(math.ceil(len(ordered) * share - _ROUNDING), 1) - 1]
