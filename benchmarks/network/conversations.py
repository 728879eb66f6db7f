"""Generate a seeded trace of conversations, whose prompts contain all earlier turns.

Lengths follow the chat traces that Mooncake published (Qin et al. 2024, arXiv 2407.00079), at a
fifth of their size: long-tailed, with many sessions at a time, and few system prompts that many
sessions share.
"""

from __future__ import annotations

import random
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Turn:
    """Hold a user's new tokens, the length of the reply, and the seconds before the turn."""

    tokens: list[int]
    output: int
    pause: float


@dataclass(frozen=True, slots=True)
class Conversation:
    """Hold the turns of a conversation that begins `start` seconds into the trace."""

    start: float
    turns: list[Turn]


def conversations(
    seed: int,
    *,
    seconds: float,
    rate: float,
    vocab: int,
    first_id: int,
    systems: int = 4,
    system_tokens: int = 400,
    median_tokens: int = 250,
    median_output: int = 60,
    mean_turns: float = 5.0,
    mean_pause: float = 3.0,
) -> list[Conversation]:
    """Return the conversations of a trace.

    rate: new conversations per second (Poisson arrivals) during `seconds`.
    """
    rng = random.Random(seed)

    def said(count: int) -> list[int]:
        return [rng.randrange(first_id, vocab) for _ in range(count)]

    def length(median: int) -> int:
        return max(4, min(8 * median, round(median * rng.lognormvariate(0.0, 0.8))))

    prompts = [said(system_tokens) for _ in range(systems)]
    found, start = [], rng.expovariate(rate)
    while start < seconds:
        turns = [
            Turn([*rng.choice(prompts), *said(length(median_tokens))], length(median_output), 0.0)
        ]
        while rng.random() > 1 / mean_turns:
            turns.append(
                Turn(
                    said(length(median_tokens)),
                    length(median_output),
                    rng.expovariate(1 / mean_pause),
                )
            )
        found.append(Conversation(start, turns))
        start += rng.expovariate(rate)
    return found
