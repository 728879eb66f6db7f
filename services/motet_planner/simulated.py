"""Simulate one instance from event to event, without computing the steps between them.

Prompts are prefilled one after the other, in order of arrival; replies are decoded together, a
token each per step. The rate depends on their number, so each arrival and each end changes when the
others end: `progress` counts tokens since the beginning, the same for all that decode, and a reply
ends when progress reaches a number known in advance.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

from motet_planner.speed import Speed

TIME_RESOLUTION = (
    1e-8  # seconds; what is due within them is done now: the resolution of floats over a day
)


class SimulatedRequest:
    """Represent a simulated request.

    Times are seconds since the beginning of the traffic; negative: not yet.
    """

    __slots__ = ("at", "ended", "first", "output", "prompt", "uncached")

    def __init__(self, at: float, prompt: int, output: int, cached: float):
        self.at = at
        self.prompt = prompt
        self.output = output
        self.uncached = max(1.0, prompt * (1 - cached))
        self.first = -1.0  # time of its first token
        self.ended = -1.0


class Instance:
    """Simulate one instance: `advance` to a time, then `take` jobs.

    `next_event` returns when it has to be advanced again at the latest.
    """

    __slots__ = (
        "_at",
        "_decoding",
        "_left",
        "_numbers",
        "_progress",
        "_queue",
        "_speed",
        "_steps",
        "ahead",
        "cached_tokens",
        "ready_at",
        "started_at",
        "state",
        "version",
    )

    def __init__(self, speed: Speed, steps: list[float], started_at: float, ready_at: float):
        self._speed = speed
        self._steps = steps  # `speed.table()`
        self._queue: deque[SimulatedRequest] = (
            deque()
        )  # to be prefilled; the first is in prefill if there is room
        self._left = 0.0  # tokens left of the first prompt; 0: not begun
        self._decoding: list[tuple[float, int, SimulatedRequest]] = []  # heap by final progress
        self._numbers = itertools.count()
        self._progress = 0.0
        self._at = started_at
        self.ahead = 0.0  # tokens to prefill, of all queued prompts
        self.cached_tokens = 0  # tokens of jobs in prefill or decode, at their final length
        self.state = "starting"  # starting | ready | draining | gone; set by the fleet
        self.started_at = started_at
        self.ready_at = ready_at
        self.version = 0  # of `next_event`: events of older versions are void

    @property
    def streams(self) -> int:
        return len(self._queue) + len(self._decoding)

    @property
    def running(self) -> int:
        """Return the requests in service as an engine counts, admitted ones in prefill included."""
        return min(self.streams, self._speed.max_running)

    def take(self, job: SimulatedRequest) -> None:
        self._queue.append(job)
        self.ahead += job.uncached
        self._begin()

    def advance(self, now: float) -> list[SimulatedRequest]:
        """Advance to `now`, not beyond `next_event`; returns the jobs that ended by then."""
        elapsed, self._at = now - self._at, now
        prefill, decode = self._rates()
        self._progress += elapsed * decode
        ended: list[SimulatedRequest] = []
        while self._decoding and self._decoding[0][0] <= self._progress + TIME_RESOLUTION * decode:
            ended.append(self._end(heapq.heappop(self._decoding)[2], now))
        if self._left:
            done = min(elapsed * prefill, self._left)
            self._left -= done
            self.ahead -= done
            if self._left <= TIME_RESOLUTION * prefill:
                ended += self._prefilled(now)
        self._begin()
        return ended

    def next_event(self) -> float:
        """Return when the next prompt or reply is complete; infinity: never."""
        prefill, decode = self._rates()
        found = self._at + self._left / prefill if self._left else math.inf
        if self._decoding:
            found = min(found, self._at + max(0.0, self._decoding[0][0] - self._progress) / decode)
        return found

    def seconds_ahead(self, reply: float) -> float:
        """Return a router's cost in seconds: prefill ahead of a request, and present streams."""
        rows = len(self._steps) - 1
        return (
            self.ahead * self._speed.prefill_token
            + self.streams * reply / 2 * self._steps[rows] / rows
        )

    def _rates(self) -> tuple[float, float]:
        """Return tokens per second: of the prompt in prefill, and of each reply."""
        share = self._speed.prefill_share if self._left and self._decoding else 0.0
        prefill = (share or 1.0) / max(self._speed.prefill_token, 1e-12)
        return prefill, (1.0 - share) / self._steps[len(self._decoding)]

    def _begin(self) -> None:
        """Begin to prefill the next prompt, if there is room for it."""
        if self._left or not self._queue or len(self._decoding) >= self._speed.max_running:
            return
        job, room = self._queue[0], self._speed.kv_tokens
        size = job.prompt + job.output
        if room and self._decoding and self.cached_tokens + size > room:
            return
        self.cached_tokens += size
        self._left = job.uncached

    def _prefilled(self, now: float) -> list[SimulatedRequest]:
        job = self._queue.popleft()
        self.ahead = self.ahead - self._left if self._queue else 0.0  # drops the rounding error
        self._left = 0.0
        job.first = now
        if job.output <= 1:
            return [self._end(job, now)]
        heapq.heappush(self._decoding, (self._progress + job.output - 1, next(self._numbers), job))
        return []

    def _end(self, job: SimulatedRequest, now: float) -> SimulatedRequest:
        job.ended = now
        self.cached_tokens -= job.prompt + job.output
        return job
