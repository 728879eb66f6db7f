"""What is short, where, by which numbers, and what to turn."""

from __future__ import annotations

import enum
from typing import Literal

from msgspec import Struct

Severity = Literal["warning", "critical"]


class Layer(enum.Enum):
    """Where a request can be held up, from the machine up. A finding belongs to the lowest one that explains it."""

    L0 = "machine"  # cores, and who else has them
    L1 = "model"  # how long the arithmetic of a step takes
    L2 = "cache"  # room for keys and values
    L3 = "scheduler"  # what is computed together in a step
    L4 = "fleet"  # how many instances, and who is sent where
    L5 = "text"  # tokenizers and gateways: text, protocols, connections
    L6 = "client"  # who reads the replies


class Finding(Struct, kw_only=True):
    """One shortage.

    name: one of `rules.NAMES`, stable. where: instances, or for a machine its host names. numbers: what says so; shares
    between 0 and 1, seconds, counts. cost: requests that it holds up at any moment, on average.
    """

    name: str
    what: str
    layer: str
    layer_name: str
    resource: str
    where: list[str]
    numbers: dict[str, float]
    knob: str
    severity: Severity = "warning"
    cost: float = 0.0


def found(
    name: str,
    what: str,
    layer: Layer,
    resource: str,
    where: list[str],
    numbers: dict[str, float],
    knob: str,
    *,
    cost: float,
    requests: float,
) -> Finding:
    """One that holds up `cost` of `requests`: critical, if that is at least half of them."""
    return Finding(
        name=name,
        what=what,
        layer=layer.name,
        layer_name=layer.value,
        resource=resource,
        where=where,
        numbers={key: round(value, 4) for key, value in numbers.items()},
        knob=knob,
        severity="critical" if cost >= max(requests, 1.0) / 2 else "warning",
        cost=round(cost, 3),
    )
