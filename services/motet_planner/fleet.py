"""Simulate a fleet: route requests to instances, remove instances, and sum instance-seconds."""

from __future__ import annotations

from collections import deque
from random import Random

from motet_planner.simulated import Instance, SimulatedRequest
from motet_planner.speed import Speed

SAMPLED_INSTANCES = 24  # instances, about, compared for one request if there are more
_REPLY_WEIGHT = 0.05  # weight of the newest reply in the mean length
_INITIAL_REPLY_TOKENS = 64.0  # tokens of a reply, before any is known


class Fleet:
    """Keep a simulation's instances.

    Requests that find no ready instance are held for up to `max_wait` seconds, then dropped.
    """

    def __init__(self, speed: Speed, max_wait: float, seed: int):
        self.ready: list[Instance] = []
        self.starting: list[Instance] = []
        self.draining: list[Instance] = []
        self.held: deque[SimulatedRequest] = deque()
        self.unserved = 0
        self._seconds = 0.0  # instance-seconds of instances that are gone
        self._speed = speed
        self._steps = speed.table()
        self._max_wait = max_wait
        self._random = Random(f"{seed}/fleet")
        self._reply = _INITIAL_REPLY_TOKENS

    @property
    def requested(self) -> int:
        """Return the number of ready and starting instances, without those that drain."""
        return len(self.ready) + len(self.starting)

    def add(self, now: float, cold_start: float) -> Instance:
        instance = Instance(self._speed, self._steps, now, now + cold_start)
        self.starting.append(instance)
        return instance

    def has_started(self, instance: Instance) -> None:
        self.starting.remove(instance)
        self.ready.append(instance)
        instance.state = "ready"

    def pick(self, job: SimulatedRequest) -> Instance | None:
        """Return the instance for `job`; None: no instance is ready, and the job is held."""
        if not self.ready:
            self.held.append(job)
            return None
        self._reply += _REPLY_WEIGHT * (job.output - self._reply)
        return min(self._candidates(), key=lambda instance: instance.seconds_ahead(self._reply))

    def take_held(self) -> deque[SimulatedRequest]:
        """Return and clear all held jobs, to be picked for again."""
        taken, self.held = self.held, deque()
        return taken

    def drop_expired(self, now: float) -> None:
        """Give up the jobs that have been held for too long."""
        while self.held and self.held[0].at + self._max_wait < now:
            self.held.popleft()
            self.unserved += 1

    def shrink(self, count: int, now: float) -> None:
        """Remove `count` instances: the youngest starting ones first, then the least loaded."""
        for _ in range(count):
            if self.starting:
                self._gone(self.starting.pop(), now)
                continue
            instance = min(self.ready, key=lambda each: each.streams)
            self.ready.remove(instance)
            instance.state = "draining"
            self.draining.append(instance)
            self.drained(instance, now)

    def drained(self, instance: Instance, now: float) -> None:
        """Remove a draining instance if it has no streams left."""
        if instance.state == "draining" and not instance.streams:
            self.draining.remove(instance)
            self._gone(instance, now)

    def seconds(self, now: float) -> float:
        """Return the seconds of all instances, from the request for each until it is gone."""
        return self._seconds + sum(
            now - each.started_at for each in [*self.ready, *self.starting, *self.draining]
        )

    def _candidates(self) -> list[Instance]:
        if (step := len(self.ready) // SAMPLED_INSTANCES) > 1:
            return self.ready[self._random.randrange(step) :: step]
        self.ready.append(self.ready.pop(0))  # rotate: ties go to another each time
        return self.ready

    def _gone(self, instance: Instance, now: float) -> None:
        instance.state = "gone"
        self._seconds += now - instance.started_at
