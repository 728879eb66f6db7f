"""Compute a batch so that an item that fails it fails alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
Result = TypeVar("Result")


def computed(
    compute: Callable[[Sequence[Item]], Sequence[Result]], items: Sequence[Item]
) -> list[Result | Exception]:
    """Return the result of each item, or what computing it alone raises.

    A batch that raises, or that does not fit into memory, is computed again in halves.

    compute: returns the results of one batch, in order; computing an item twice must do no harm.
    """
    try:
        return [*compute(items)]
    except Exception as error:  # whatever model code raises for one of them
        if len(items) <= 1:
            return [error] * len(items)
        half = len(items) // 2
        return [*computed(compute, items[:half]), *computed(compute, items[half:])]
