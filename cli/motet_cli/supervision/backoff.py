"""Compute the delays between restarts of a process: exponential, with a pause in a crash loop."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_LONGEST_STREAK = 64  # exits from which on the delay grows no more


@dataclass(frozen=True, kw_only=True)
class BackoffPolicy:
    """Define the delays: from `first` by `factor` up to `cap` seconds.

    A run of `healthy_after` seconds resets the delay. More than `burst` exits within `window`
    seconds are a crash loop, after which the next start waits `pause` seconds.
    """

    first: float = 0.1
    factor: float = 2.0
    cap: float = 5.0
    healthy_after: float = 10.0
    burst: int = 3
    window: float = 300.0  # long enough for a process that loads for a minute and then fails
    pause: float = 30.0


class Backoff:
    """Track the exits of one process and compute its next delay."""

    def __init__(self, policy: BackoffPolicy) -> None:
        self.policy = policy
        self._exits: deque[float] = deque(maxlen=policy.burst + 1)
        self._streak = 0

    def exited(self, now: float, ran_for: float) -> float:
        """Record an exit at `now` (monotonic seconds); return the seconds until the next start."""
        policy = self.policy
        self._streak = 0 if ran_for >= policy.healthy_after else self._streak
        self._exits.append(now)
        if self.crash_loop(now):
            return policy.pause
        # Bounded, since a float overflows after some 1000 runs without a pause.
        delay = min(policy.cap, policy.first * policy.factor ** min(self._streak, _LONGEST_STREAK))
        self._streak += 1
        return delay

    def crash_loop(self, now: float) -> bool:
        """Return True if more than `burst` exits happened within the last `window` seconds."""
        recent = [t for t in self._exits if now - t <= self.policy.window]
        return len(recent) > self.policy.burst
