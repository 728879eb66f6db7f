"""Read a server's load from its metrics in Prometheus' text format."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{[^}]*\})? (\S+)", re.MULTILINE)


def read_load(text: str, names: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics of `names`, each summed over its labels, by decode's names.

    A share of used blocks (`kv_used`) becomes the mean share of free ones.
    """
    sums: dict[str, float] = {}
    shares: list[float] = []
    for name, value in _SAMPLE.findall(text):
        if name not in names:
            continue
        try:
            number = float(value)
        except ValueError:
            continue
        if not math.isfinite(number):
            continue
        if names[name] == "kv_used":
            shares.append(number)
        else:
            sums[names[name]] = sums.get(names[name], 0.0) + number
    if shares:
        sums["kv_free"] = min(1.0, max(0.0, 1.0 - sum(shares) / len(shares)))
    return sums
