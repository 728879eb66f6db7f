"""Decide per request whether a prompt is prefilled locally or remotely, from measured speeds.

    local  = (tokens queued before it + its own) · seconds per token · slowdown by running streams
    remote = (tokens queued before it + its own) · seconds per token
             + its own · transfer seconds per token + delay

A prompt is computed remotely if that takes less time, by MARGIN where no local stream gains from
it: the conditional disaggregation of DistServe (Zhong et al. 2024) and NVIDIA Dynamo.
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

MARGIN = 0.10  # fraction of the local time to be saved remotely, if no local stream benefits


@dataclass(frozen=True, slots=True)
class LocalPrefill:
    """Prefill load of this engine.

    ahead: tokens queued before the request. prefill_token: seconds per token; 0 if not known yet.
    streams: running requests that decode. slowdown: upper bound of the ratio by which prefill may
    stretch their steps; 0: unbounded.
    """

    ahead: int
    prefill_token: float
    streams: int = 0
    slowdown: float = 0.0

    def seconds(self, tokens: int, prefill_token: float) -> float:
        """Return the seconds until `tokens` more tokens are prefilled."""
        # A step stretched to `s` times its length spends s - 1 of these s parts on prefill.
        stretched = (
            self.slowdown / (self.slowdown - 1) if self.streams and self.slowdown > 1 else 1.0
        )
        return (self.ahead + tokens) * prefill_token * stretched


@dataclass(frozen=True, slots=True)
class RemotePrefillOffer:
    """Prefill load of a remote worker."""

    instance: str
    ahead: float
    prefill_token: float

    def seconds(self, tokens: int, prefill_token: float, transfer_token: float) -> float:
        """Return the seconds until `tokens` tokens are prefilled and transferred, without delay."""
        return (self.ahead + tokens) * prefill_token + tokens * transfer_token


class Delay:
    """Estimate the seconds that a handover takes beyond computing and sending.

    They pass between the decision and the first remote step, while steps wait for each other, and
    between the last part and the next local step. The estimate is the median of recent
    measurements; these expire, and without any it is a constant, so that a handover that did not
    pay is tried again later.
    """

    DEFAULT = 0.010
    SAMPLES = 15
    MAX_AGE = 60.0

    def __init__(self, clock: Callable[[], float] = time.monotonic):
        self._clock = clock
        self._samples: deque[tuple[float, float]] = deque(maxlen=self.SAMPLES)

    def note(self, seconds: float) -> None:
        """Record by how many seconds a handover exceeded its expected time without a delay."""
        self._samples.append((self._clock(), max(0.0, seconds)))

    @property
    def seconds(self) -> float:
        since = self._clock() - self.MAX_AGE
        while self._samples and self._samples[0][0] < since:
            self._samples.popleft()
        return median(seconds for _, seconds in self._samples) if self._samples else self.DEFAULT


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """Name the instance that prefills a prompt, and the expected seconds without a delay.

    The seconds are NaN if unknown.
    """

    instance: str
    seconds: float


def choose(
    policy: Policy,
    tokens: int,
    local: LocalPrefill,
    remote: Sequence[RemotePrefillOffer],
    transfer_token: float,
    delay: float = Delay.DEFAULT,
) -> PrefillChoice | None:
    """Return the instance that prefills `tokens` tokens; None for this engine.

    transfer_token: transfer seconds per token. delay: seconds beyond computing and transfer. A
    worker whose speed is not known yet is assumed to be as fast as this engine, or as the fastest
    remote worker if that is not known either.
    """
    if policy == "never" or not remote or tokens < 1:
        return None
    known = [worker.prefill_token for worker in remote if worker.prefill_token > 0]
    guess = local.prefill_token or (min(known) if known else 0.0)

    def remote_seconds(worker: RemotePrefillOffer) -> float:
        return worker.seconds(tokens, worker.prefill_token or guess, transfer_token)

    best = min(remote, key=remote_seconds)
    choice = PrefillChoice(best.instance, remote_seconds(best) if guess else math.nan)
    if policy == "always":
        return choice
    limit = local.seconds(tokens, local.prefill_token or guess)
    if not local.streams:  # with local streams, their shorter steps are worth the margin
        limit *= 1 - MARGIN
    return choice if choice.seconds + delay < limit else None
