"""Simulate traffic on a fixed number of instances or under a policy: a day of it in seconds.

A discrete-event simulation: arrivals, completed prompts and replies, started instances, and
observations for the policy, which is the service's own code. It is deterministic: the same traffic and seed give
the same numbers.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from motet_planner.fleet import Fleet
from motet_planner.history import Sample
from motet_planner.outcome import Replicas, SimulationOutcome
from motet_planner.policy import Policy, RolePolicy
from motet_planner.simulated import Instance, SimulatedRequest
from motet_planner.speed import Speed
from motet_planner.traffic import Arrival
from motet_shared.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """Hold the parameters of a simulation.

    speed: of each instance.
    policy: None: `instances` stay from beginning to end.
    instances: at the beginning, ready.
    interval: seconds between two decisions of the policy.
    cold_start: seconds.
    max_wait: seconds that a request waits while no instance is ready.
    lead: seconds for which the policy has observed an idle fleet before the traffic begins.
    sample: each simulated instance and request stands for so many, so that thousands of instances
        are simulated in seconds; the caller thins the traffic. Waits come out a little too long, as
        fewer instances share the arrivals.
    """

    speed: Speed
    policy: RolePolicy | None = None
    instances: int = 1
    interval: float = 2.0
    cold_start: float = 30.0
    max_wait: float = 60.0
    lead: float = 0.0
    sample: int = 1
    seed: int = 0

    def __post_init__(self) -> None:
        if self.instances < 0 or (self.policy is None and not self.instances):
            raise ConfigError(
                f"instances={self.instances}: give at least 1, or a policy", param="instances"
            )
        if self.sample < 1:
            raise ConfigError(f"sample={self.sample}: give at least 1", param="sample")
        if self.interval <= 0:
            raise ConfigError(f"interval={self.interval:g}: give more than 0", param="interval")


def simulate(
    scenario: Scenario, traffic: Iterable[Arrival], seconds: float | None = None
) -> SimulationOutcome:
    """Simulate until all replies are complete.

    `seconds`: how long the traffic lasts (default: until its last request).
    """
    return _Run(scenario, traffic, seconds).run()


class _Run:
    def __init__(self, scenario: Scenario, traffic: Iterable[Arrival], seconds: float | None):
        self._scenario = scenario
        self._traffic = iter(traffic)
        self._seconds = seconds
        self._fleet = Fleet(scenario.speed, scenario.max_wait, scenario.seed)
        self._policy = Policy(scenario.policy) if scenario.policy is not None else None
        self._events: list[tuple[float, int, Any, Any]] = []  # (time, order, callback, argument)
        self._order = itertools.count()
        self._jobs: list[SimulatedRequest] = []
        self._replicas = Replicas()
        self._has_arrivals = True
        self._open = 0  # jobs at instances
        self._seen = 0  # jobs included in earlier samples
        self._now = 0.0

    def run(self) -> SimulationOutcome:
        for _ in range(-(-self._scenario.instances // self._scenario.sample)):
            self._fleet.has_started(self._fleet.add(0.0, 0.0))
        self._next_arrival()
        if self._policy is not None:
            self._at(-self._scenario.lead, self._observe, None)
        events = self._events
        while events and (self._has_arrivals or self._open or self._fleet.held):
            self._now, _, do, what = heapq.heappop(events)
            do(what)
        return self._outcome()

    # --------------------------------------------------------------------------------------- events
    def _at(self, when: float, do: Any, what: Any) -> None:
        heapq.heappush(self._events, (when, next(self._order), do, what))

    def _next_arrival(self) -> None:
        arrival = next(self._traffic, None)
        if arrival is None:
            self._has_arrivals = False
        else:
            self._at(arrival.at, self._arrive, arrival)

    def _arrive(self, arrival: Arrival) -> None:
        job = SimulatedRequest(
            arrival.at, arrival.prompt, arrival.output, self._scenario.speed.cached
        )
        self._jobs.append(job)
        self._place(job)
        self._next_arrival()

    def _place(self, job: SimulatedRequest) -> None:
        instance = self._fleet.pick(job)
        if instance is not None:
            self._open += 1
            self._advance(instance, job)

    def _advance(self, instance: Instance, job: SimulatedRequest | None = None) -> None:
        """Advance an instance to now; `job` is new there."""
        self._open -= len(instance.advance(self._now))
        if job is not None:
            instance.take(job)
        instance.version += 1
        if (due := instance.next_event()) < math.inf:
            self._at(due, self._due, (instance, instance.version))
        if instance.state == "draining":
            self._fleet.drained(instance, self._now)

    def _due(self, event: tuple[Instance, int]) -> None:
        instance, version = event
        if instance.version == version:
            self._advance(instance)

    def _started(self, instance: Instance) -> None:
        if instance.state != "starting":
            return
        self._fleet.has_started(instance)
        instance.advance(self._now)
        self._fleet.drop_expired(self._now)
        for job in self._fleet.take_held():
            self._place(job)
        self._note()

    # --------------------------------------------------------------------------------------- policy
    def _observe(self, _: None) -> None:
        """Sample as the service's observer does, scaled up, and apply the policy's decision."""
        fleet, many = self._fleet, self._scenario.sample
        fleet.drop_expired(self._now)
        serving = [*fleet.ready, *fleet.draining]
        running = sum([instance.running for instance in serving])
        sample = Sample(
            at=self._now,
            arrivals=(len(self._jobs) - self._seen) * many,
            running=running * many,
            waiting=(self._open - running + len(fleet.held)) * many,
            ready=len(fleet.ready) * many,
            starting=len(fleet.starting) * many,
            cold_start=self._scenario.cold_start,
        )
        self._seen = len(self._jobs)
        if self._policy is not None:
            self._scale(-(-self._policy.decide(sample).target // many))
        self._at(self._now + self._scenario.interval, self._observe, None)

    def _scale(self, target: int) -> None:
        fleet = self._fleet
        for _ in range(target - fleet.requested):
            instance = fleet.add(self._now, self._scenario.cold_start)
            self._at(instance.ready_at, self._started, instance)
        fleet.shrink(fleet.requested - target, self._now)
        self._note()

    def _note(self) -> None:
        self._replicas.note(self._now, len(self._fleet.ready), self._fleet.requested)

    def _outcome(self) -> SimulationOutcome:
        end = max([self._seconds or 0.0, *(job.at for job in self._jobs[-1:])])
        self._fleet.unserved += len(self._fleet.held)  # no instance will be added any more
        many = self._scenario.sample
        return SimulationOutcome(
            jobs=self._jobs,
            seconds=end,
            span=max(self._now, end),
            instance_seconds=self._fleet.seconds(max(self._now, end)) * many,
            unserved=self._fleet.unserved * many,
            replicas=self._replicas,
            sample=many,
            overhead=self._scenario.speed.overhead,
        )
