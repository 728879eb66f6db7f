"""Lay out one reply's time as a waterfall: infer start times that services do not report."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Services in the order of a request, each inside the one before, with their stages in order.
STAGES = {
    "gateway": (),
    "tokenizer": ("encode", "media", "wait"),
    "decode": ("grammar", "queue", "transfer", "prefill", "decode"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """A service, or a stage of one: `decode`, `decode.prefill`.

    start, seconds: when it began, counted from the receipt of the request, and how long it took.
    """

    name: str
    start: float
    seconds: float


def spans(timing: Mapping[str, float]) -> list[Span]:
    """Return the services and stages of a reply, each service before its stages.

    Services report how long a stage took, not when it began: stages are laid one after another, and
    a service begins where those of the one before it have ended. The rest at the end is transport
    and waiting for the client.
    """
    found: list[Span] = []
    start = 0.0
    for role, stages in STAGES.items():
        if (total := timing.get(f"{role}.total")) is not None:
            found.append(Span(role, start, total))
        for stage in stages:
            if seconds := timing.get(f"{role}.{stage}"):
                found.append(Span(f"{role}.{stage}", start, seconds))
                start += seconds
    return found
