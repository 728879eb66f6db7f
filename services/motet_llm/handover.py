"""Whether somebody else is to compute a prompt: decided per request, from what both sides are measured to take.

here:  (tokens prefilled first + its own) · seconds per token · how much running streams slow prefilling down
there: (tokens prefilled first + its own) · seconds per token + its own · seconds per token on the way + a delay
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Policy = Literal["auto", "always", "never"]

DELAY = 0.010  # seconds from the decision to the first step elsewhere, and from the last part to the next step here
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
        """Until so many tokens are prefilled there and have come here."""
        return (self.ahead + tokens) * prefill_token + tokens * transfer_token + DELAY


def choose(policy: Policy, tokens: int, here: Here, there: Sequence[There], transfer_token: float) -> str | None:
    """The instance that is to prefill `tokens` tokens; None: this one. transfer_token: seconds per token on the way.

    Where somebody's speed is not known yet, it is taken to be as fast as the others.
    """
    if policy == "never" or not there or tokens < 1:
        return None
    known = [worker.prefill_token for worker in there if worker.prefill_token > 0]
    guess = here.prefill_token or (min(known) if known else 0.0)

    def elsewhere(worker: There) -> float:
        return worker.seconds(tokens, worker.prefill_token or guess, transfer_token)

    best = min(there, key=elsewhere)
    if policy == "always":
        return best.instance
    limit = here.seconds(tokens, here.prefill_token or guess)
    if not here.streams:  # else streams that do not stutter are worth as much
        limit *= 1 - MARGIN
    return best.instance if guess and elsewhere(best) < limit else None
