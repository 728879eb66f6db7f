"""Define the result of a diagnosis: the bottleneck, its place, its numbers and its remedy."""

from __future__ import annotations

import enum
from typing import Literal

from msgspec import Struct

Severity = Literal["warning", "critical"]


class Layer(enum.Enum):
    """Name the layers that can delay a request, from the machine up.

    A finding belongs to the lowest layer that explains it.
    """

    L0 = "machine"  # cores, and other processes on them
    L1 = "model"  # duration of a step's arithmetic
    L2 = "cache"  # capacity for keys and values
    L3 = "scheduler"  # composition of steps
    L4 = "fleet"  # number of instances, and routing
    L5 = "text"  # tokenizers and gateways: text, protocols, connections
    L6 = "client"  # readers of the replies


class Finding(Struct, kw_only=True):
    """Describe one bottleneck.

    name: one of `rules.NAMES`, stable.
    what: the bottleneck in a sentence.
    where: instances, or host names for a machine.
    numbers: the evidence: shares between 0 and 1, seconds, counts.
    knob: the remedy, with its flags and environment variables.
    cost: average number of requests that it delays at any moment.
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
    """Return a finding that delays `cost` of `requests`; critical if that is at least half."""
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
