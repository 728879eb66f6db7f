"""How long a pause has to last until it is the end of a turn: `semantic_vad` of the realtime API.

Words tell more than silence: after "show me the" a speaker is given seconds, after "show me the red circle" hardly any.
The voice activity service tells of every short pause; from the transcript so far comes how long the pause has to last.
"""

from __future__ import annotations

import logging

from motet_shared.bus import Bus
from motet_shared.errors import BadRequest, DeadlineExceeded, Overloaded, StreamBroken, Unavailable, UnknownModel
from motet_shared.messages import Judge, Verdict

log = logging.getLogger(__name__)

LONGEST_MS = {"low": 8000, "medium": 4000, "auto": 4000, "high": 2000}  # by eagerness: however unfinished it sounds
SHORTEST_MS = {"low": 400, "medium": 250, "auto": 250, "high": 150}  # however finished
UNSURE = 0.5


def patience_ms(finished: float, eagerness: str) -> int:
    """How long a pause must last to end the turn, for the probability that the words are `finished`.

    Falls steeply at first: what is as likely finished as not is given a quarter of the longest time.
    """
    if eagerness not in LONGEST_MS:
        known = ", ".join(LONGEST_MS)
        raise BadRequest(f"eagerness: {eagerness!r} is unknown; use one of {known}", param="eagerness")
    shortest, longest = SHORTEST_MS[eagerness], LONGEST_MS[eagerness]
    return round(shortest + (longest - shortest) * (1 - finished) ** 2)


async def finished(bus: Bus, text: str, *, deadline: float = 0.5) -> float:
    """The probability that who has said `text` has finished; `UNSURE` where nobody can tell in time."""
    try:
        async with bus.open("vad", Judge(text=text), deadline=deadline) as stream:
            async for body in stream:
                if isinstance(body, Verdict):
                    return body.finished
    except (Unavailable, StreamBroken, UnknownModel, DeadlineExceeded, Overloaded) as error:
        log.debug("turns are judged by silence alone: %s", error)
    return UNSURE
