"""Whether somebody else is to compute a prompt: decided per request, from what both sides are measured to take.

here:  (tokens prefilled first + its own) · seconds per token · how much running streams slow prefilling down
there: (tokens prefilled first + its own) · seconds per token + its own · seconds per token on the way + a delay
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

Policy = Literal["auto", "always", "never"]

MARGIN = 0.10  # of the time here, by which it must be shorter elsewhere if nobody here would notice


@dataclass(frozen=True, slots=True)
class Here:
    """This engine. ahead: tokens that it prefills first. prefill_token: seconds each; 0: not known yet.

    streams: that run. slowdown: to what multiple of a step without it prefilling may stretch theirs; 0: to any.
    """

    ahead: int
    prefill_token: float
    streams: int = 0
    slowdown: float = 0.0

    def seconds(self, tokens: int, prefill_token: float) -> float:
        """Until so many tokens more are prefilled."""
        # Of a step that is stretched to `s` times its length, the part s - 1 is prefilling.
        stretched = self.slowdown / (self.slowdown - 1) if self.streams and self.slowdown > 1 else 1.0
        return (self.ahead + tokens) * prefill_token * stretched


@dataclass(frozen=True, slots=True)
class There:
    """A worker that prefills for others."""

    instance: str
    ahead: float
    prefill_token: float

    def seconds(self, tokens: int, prefill_token: float, transfer_token: float) -> float:
        """Until so many tokens are prefilled there and have come here, if nothing else takes time."""
        return (self.ahead + tokens) * prefill_token + tokens * transfer_token


class Delay:
    """Seconds that a handover takes beyond computing and sending: from the decision to the first step elsewhere, for
    steps that wait for each other, and from the last part to the next step here.

    The median of what was measured lately. Without that, a guess: so one that did not pay is tried again some time.
    """

    GUESS = 0.010
    COUNT = 15
    AGE = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._noted: deque[tuple[float, float]] = deque(maxlen=self.COUNT)

    def note(self, seconds: float) -> None:
        """One handover took so much longer than it was expected to take without a delay."""
        self._noted.append((self._clock(), max(0.0, seconds)))

    @property
    def seconds(self) -> float:
        since = self._clock() - self.AGE
        while self._noted and self._noted[0][0] < since:
            self._noted.popleft()
        return median(seconds for _, seconds in self._noted) if self._noted else self.GUESS


@dataclass(frozen=True, slots=True)
class Choice:
    """Who is to compute a prompt, and after how many seconds it would be here without a delay; NaN: not known."""

    instance: str
    seconds: float


def choose(
    policy: Policy,
    tokens: int,
    here: Here,
    there: Sequence[There],
    transfer_token: float,
    delay: float = Delay.GUESS,
) -> Choice | None:
    """The instance that is to prefill `tokens` tokens; None: this one.

    transfer_token: seconds per token on the way. delay: seconds beyond that and computing.
    Where somebody's speed is not known yet, it is taken to be as fast as the others.
    """
    if policy == "never" or not there or tokens < 1:
        return None
    known = [worker.prefill_token for worker in there if worker.prefill_token > 0]
    guess = here.prefill_token or (min(known) if known else 0.0)

    def elsewhere(worker: There) -> float:
        return worker.seconds(tokens, worker.prefill_token or guess, transfer_token)

    best = min(there, key=elsewhere)
    choice = Choice(best.instance, elsewhere(best) if guess else math.nan)
    if policy == "always":
        return choice
    limit = here.seconds(tokens, here.prefill_token or guess)
    if not here.streams:  # else streams that do not stutter are worth as much
        limit *= 1 - MARGIN
    return choice if choice.seconds + delay < limit else None
