"""Compute how long a pause must last to end a turn: `semantic_vad` of the realtime API.

Words tell more than silence: after "show me the" a speaker gets seconds, after "show me the red
circle" hardly any. The voice activity service reports every short pause; the transcript so far
decides how long the pause has to last.
"""

from __future__ import annotations

import logging

from motet_shared.errors import (
    BadRequest,
    DeadlineExceeded,
    Overloaded,
    StreamBroken,
    Unavailable,
    UnknownModel,
)
from motet_shared.messages import PredictTurnEnd, TurnEnd
from motet_shared.wire.bus import Bus

log = logging.getLogger(__name__)

# Pause in ms by eagerness: the longest for unfinished words, the shortest for finished ones.
LONGEST_MS = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2000}
SHORTEST_MS = {"low": 400, "medium": 250, "auto": 250, "high": 150}
UNSURE = 0.5  # probability where no estimate is available


def end_pause_ms(end_probability: float, eagerness: str) -> int:
    """Return the pause in ms that ends a turn whose words are complete with `end_probability`.

    It falls steeply at first: a probability of 0.5 gives about a quarter of the longest pause.
    Raises BadRequest for an unknown eagerness.
    """
    if eagerness not in LONGEST_MS:
        known = ", ".join(LONGEST_MS)
        raise BadRequest(
            f"eagerness: {eagerness!r} is unknown; use one of {known}", param="eagerness"
        )
    shortest, longest = SHORTEST_MS[eagerness], LONGEST_MS[eagerness]
    return round(shortest + (longest - shortest) * (1 - end_probability) ** 2)


async def end_probability(bus: Bus, text: str, *, deadline: float = 0.5) -> float:
    """Return the probability that the speaker of `text` has finished.

    Returns `UNSURE` if no service answers within `deadline` seconds.
    """
    try:
        async with bus.open("vad", PredictTurnEnd(text=text), deadline=deadline) as stream:
            async for body in stream:
                if isinstance(body, TurnEnd):
                    return body.probability
    except (Unavailable, StreamBroken, UnknownModel, DeadlineExceeded, Overloaded) as error:
        log.debug("turns are judged by silence alone: %s", error)
    return UNSURE
