"""Bound what a step prefills, so that it does not slow down running streams too much."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from operator import itemgetter

from motet_llm.engine.request import Request

from .fairness import FairShares, tenant_group
from .step_time import StepTimeEstimate

SMALLEST_CHUNK = (
    32  # tokens: 8 or 16 take as long (beside four streams of pocket-chat, on a Zen 3: 3.6 ms)
)
URGENT_SLOWDOWN = 5.0  # multiplier on decode_slowdown for urgent requests
# Seconds, divided by the streams of a step: the latency goal where none is set. One stream keeps ten
# tokens/s, faster than speech.
SHARED_GOAL = 0.1
# Seconds, the least that this goal is: 50 tokens/s, many times the pace of reading. Beside eight streams of
# 54 million parameters p99 of the time between two tokens is 51 to 56 ms while prompts come, and 75 with 0.04.
LEAST_GOAL = 0.02


@dataclass(frozen=True, kw_only=True)
class SchedulerLimits:
    """Hold the limits of a scheduler; see `EngineConfig` for the meaning of each field."""

    token_budget: int
    max_running: int
    max_waiting: int
    decode_slowdown: float = 0.0
    latency_goal: float | None = 0.0
    static_batching: bool = False
    contiguous_kv: bool = False


class TokenBudget:
    """Bound the tokens prefilled in a step, to limit the slowdown of streams that decode.

    The bound is Sarathi-Serve's (Agrawal et al. 2024): with t(rows) the seconds of a step that only
    decodes and c the seconds per prefilled token, a step of decode rows takes at most

        chunk = max((decode_slowdown - 1) · t(rows), latency_goal - t(rows)) / c

    prefill tokens; without a latency_goal, `SHARED_GOAL` / rows stands for it, or `LEAST_GOAL`. An
    urgent request may slow streams down more, by `URGENT_SLOWDOWN`: one that was interrupted (moved here or preempted,
    so that its stream stands still meanwhile), and one that is crowded out: the streams it slows
    down are mostly of one tenant, which was served at least as much.

    streams: requests that decode in the step.
    spent: tokens prefilled so far by all requests together.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pace: StepTimeEstimate,
        shares: FairShares,
        streams: Sequence[Request],
    ):
        self.spent = 0
        self._limits, self._pace, self._shares, self._streams = limits, pace, shares, streams
        self._most = limits.token_budget - len(streams)
        self._is_smooth = bool(streams and limits.decode_slowdown)
        self._chunks: dict[bool, int] = {}  # by whether the request is urgent

    def left(self, *, urgent: bool = False) -> int:
        """Return the tokens left to prefill; 0 or less if there are none."""
        if not self._is_smooth:
            return self._most - self.spent
        if urgent not in self._chunks:
            self._chunks[urgent] = self._chunk(urgent)
        return self._chunks[urgent] - self.spent

    def _chunk(self, urgent: bool) -> int:
        if not urgent and self._pace.needs_decode_sample(len(self._streams)):
            return 0
        slowdown = self._limits.decode_slowdown * (URGENT_SLOWDOWN if urgent else 1.0)
        goal = self._limits.latency_goal
        if goal is None:
            goal = max(SHARED_GOAL / len(self._streams), LEAST_GOAL)
        chunk = self._pace.chunk(len(self._streams), slowdown, goal)
        return int(min(self._most, max(SMALLEST_CHUNK, chunk)))

    def left_for(self, request: Request) -> int:
        return self.left(urgent=request.num_output > 0 or self.is_crowded_out(request))

    def is_crowded_out(self, request: Request) -> bool:
        """Return True if another tenant's streams crowd out the request.

        Its tenant has no stream here and was served no more than the dominant group, and no stream has a
        higher priority.
        """
        tenant = tenant_group(request.tenant)
        if (
            self.dominant_group is None
            or tenant in self._tenants
            or any(r.priority > request.priority for r in self._streams)
        ):
            return False
        return self._shares.served_to_group(tenant) <= self._shares.served_to_group(
            self.dominant_group
        )

    @property
    def is_long(self) -> bool:
        """Return True if at least half of the step's time is due to the number of its streams."""
        pace = self._pace
        return (
            self._is_smooth and pace.decode_step(len(self._streams)) >= 2 * pace.decode_step(1) > 0
        )

    @cached_property
    def dominant_group(self) -> str | None:
        """Return the tenant group with several streams and at least half of all, or None."""
        tenant, count = max(self._tenants.items(), key=itemgetter(1), default=("", 0))
        return tenant if count > 1 and 2 * count >= len(self._streams) else None

    @cached_property
    def _tenants(self) -> Counter[str]:
        return Counter(tenant_group(request.tenant) for request in self._streams)
