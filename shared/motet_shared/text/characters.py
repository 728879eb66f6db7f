"""Count the characters of JSON-like values, to bound a step before it is taken."""

from __future__ import annotations

from typing import Any


def characters(value: Any, most: int | None = None) -> int:
    """Count the characters of all strings in `value`.

    Keys count too; each list entry and each number counts as one. With `most`, counting stops as
    soon as the result exceeds it: a million values take about 0.3 s.
    """
    if isinstance(value, str):
        return len(value)
    found, left = 0, [value]
    while left and (most is None or found <= most):
        one = left.pop()
        if isinstance(one, str):
            found += len(one)
        elif isinstance(one, dict):
            left += one.keys()
            left += one.values()
        elif isinstance(one, list):
            found += len(one)
            left += one
        elif one is not None:
            found += 1
    return found


def is_deeper(value: Any, most: int) -> bool:
    """Return True if something in `value` lies within more than `most` lists and mappings."""
    level = [value]
    for _ in range(most + 1):
        level = [
            inner
            for one in level
            if isinstance(one, (dict, list))
            for inner in (one.values() if isinstance(one, dict) else one)
        ]
        if not level:
            return False
    return True
