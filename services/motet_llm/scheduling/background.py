"""Let background requests, those of batches, use what the others leave of the engine.

While another request can run, background requests rest. They join a step of others in two cases:
rows that decode, where they add next to nothing to its time (on a GPU, reading the weights takes
most of it); and every one of SHARED_EVERY steps, so that they advance however busy the engine is.
That is too few steps to change the 95th percentile of the time between two tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

from motet_llm.engine.request import Request
from motet_shared.messages import BACKGROUND

from .step_time import StepTimeEstimate

SHARED_EVERY = 100  # steps of others, of which background requests join one in any case
SLOWDOWN = 1.04  # of a step that background rows join


def is_background(request: Request) -> bool:
    """Return True if a request gives way to all that have a higher priority."""
    return request.priority <= BACKGROUND


class BackgroundTurns:
    """Decide which background requests take part in a step."""

    def __init__(self, pace: StepTimeEstimate):
        self._pace = pace
        self._steps = 0  # of other requests beside which background requests waited

    def is_shared(self, active: Sequence[Request], waiting: Sequence[Request]) -> bool:
        """Return True if background requests may do anything in the next step.

        active: requests that can run. waiting: those that are not admitted; both by rank.
        """
        arrival = next((request for request in waiting if not request.out_of_credit), None)
        first = (*active[:1], *(() if arrival is None else (arrival,)))
        if all(map(is_background, first)):
            return True
        if not any(map(is_background, (*active[-1:], *waiting[-1:]))):
            return True
        self._steps += 1
        return self._steps % SHARED_EVERY == 0

    def joining(self, active: Sequence[Request]) -> list[Request]:
        """Return the requests of a step that is not shared: all others, and spare rows."""
        foreground = [request for request in active if not is_background(request)]
        rows = sum(request.num_uncomputed == 1 for request in foreground)
        if not rows or rows < len(foreground):  # one prefills: the step is long already
            return foreground
        spare = self._pace.spare_rows(rows, SLOWDOWN)
        waiting = [r for r in active if is_background(r) and r.num_uncomputed == 1]
        return [*foreground, *waiting[:spare]]
