"""One reply's time as a waterfall: when each stage began, which services do not tell."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# Services as a request meets them, each inside the one before, and their stages in the order in which they run.
STAGES = {
    "gateway": (),
    "tokenizer": ("encode", "see", "wait"),
    "decode": ("grammar", "queue", "transfer", "prefill", "decode"),
}


@dataclass(frozen=True, slots=True)
class Span:
    """A service, or a stage of one: `decode`, `decode.prefill`.

    start, seconds: when it began and how long it took, from the moment at which the request came in.
    """

    name: str
    start: float
    seconds: float


def spans(timing: Mapping[str, float]) -> list[Span]:
    """The services and stages of a reply, each service before its stages.

    Services tell how long a stage took, not when it began: stages are laid one after another, and a service begins
    where those of the one before it have ended. What is left at the end is wire and waiting for the client.
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
