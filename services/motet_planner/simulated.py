"""An instance in the simulator. Between two events everything goes on evenly, so it computes none of the steps between.

Prompts are prefilled one after the other, as they came; replies are decoded together, a token each per step. How fast
depends on how many there are, so each arrival and each end changes when the others will end: `progress` is counted in
tokens since the beginning, the same for all that decode, and a reply ends when it reaches a number known in advance.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque

from motet_planner.speed import Speed

SOON = 1e-8  # seconds: what is due within them is done now. Of a day, a float tells shorter times apart no better


class Job:
    """A request on its way. Times are seconds since the beginning of the traffic; negative: not yet."""

    __slots__ = ("at", "ended", "first", "output", "prompt", "uncached")

    def __init__(self, at: float, prompt: int, output: int, cached: float):
        self.at = at
        self.prompt = prompt
        self.output = output
        self.uncached = max(1.0, prompt * (1 - cached))
        self.first = -1.0  # when its first token was made
        self.ended = -1.0


class Instance:
    """`advance` to a moment, then `take`; `next_event` says when it has to be advanced again, at the latest."""

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
        self._queue: deque[Job] = deque()  # to be prefilled, the first one under way if there is room
        self._left = 0.0  # tokens of the first one; 0: it has not begun
        self._decoding: list[tuple[float, int, Job]] = []  # by the progress at which they end
        self._numbers = itertools.count()
        self._progress = 0.0
        self._at = started_at
        self.ahead = 0.0  # tokens to prefill
        self.cached_tokens = 0  # of those that are decoded or prefilled: what they will hold at their end
        self.state = "starting"  # starting | ready | draining | gone; the fleet says which
        self.started_at = started_at
        self.ready_at = ready_at
        self.version = 0  # of `next_event`: one that was told for an older one is not due

    @property
    def streams(self) -> int:
        return len(self._queue) + len(self._decoding)

    @property
    def running(self) -> int:
        """In service, as an engine counts: what waits for its prompt to be prefilled has been admitted, too."""
        return min(self.streams, self._speed.max_running)

    def take(self, job: Job) -> None:
        self._queue.append(job)
        self.ahead += job.uncached
        self._begin()

    def advance(self, now: float) -> list[Job]:
        """To `now`, which is not beyond `next_event`; the jobs that ended by it."""
        elapsed, self._at = now - self._at, now
        prefill, decode = self._rates()
        self._progress += elapsed * decode
        ended: list[Job] = []
        while self._decoding and self._decoding[0][0] <= self._progress + SOON * decode:
            ended.append(self._end(heapq.heappop(self._decoding)[2], now))
        if self._left:
            done = min(elapsed * prefill, self._left)
            self._left -= done
            self.ahead -= done
            if self._left <= SOON * prefill:
                ended += self._prefilled(now)
        self._begin()
        return ended

    def next_event(self) -> float:
        """When a prompt or a reply is complete; infinity: never."""
        prefill, decode = self._rates()
        found = self._at + self._left / prefill if self._left else math.inf
        if self._decoding:
            found = min(found, self._at + max(0.0, self._decoding[0][0] - self._progress) / decode)
        return found

    def seconds_ahead(self, reply: float) -> float:
        """What a router goes by: seconds of prefilling before a new request, and what the streams there will cost."""
        rows = len(self._steps) - 1
        return self.ahead * self._speed.prefill_token + self.streams * reply / 2 * self._steps[rows] / rows

    def _rates(self) -> tuple[float, float]:
        """Tokens per second: of the prompt that is prefilled, and of each reply."""
        share = self._speed.prefill_share if self._left and self._decoding else 0.0
        prefill = (share or 1.0) / max(self._speed.prefill_token, 1e-12)
        return prefill, (1.0 - share) / self._steps[len(self._decoding)]

    def _begin(self) -> None:
        """The next prompt, where there is room for it."""
        if self._left or not self._queue or len(self._decoding) >= self._speed.max_running:
            return
        job, room = self._queue[0], self._speed.kv_tokens
        size = job.prompt + job.output
        if room and self._decoding and self.cached_tokens + size > room:
            return
        self.cached_tokens += size
        self._left = job.uncached

    def _prefilled(self, now: float) -> list[Job]:
        job = self._queue.popleft()
        self.ahead = self.ahead - self._left if self._queue else 0.0  # no rest of rounding stays
        self._left = 0.0
        job.first = now
        if job.output <= 1:
            return [self._end(job, now)]
        heapq.heappush(self._decoding, (self._progress + job.output - 1, next(self._numbers), job))
        return []

    def _end(self, job: Job, now: float) -> Job:
        job.ended = now
        self.cached_tokens -= job.prompt + job.output
        return job
