"""Summarize a simulation: latencies, share within limits, instances over time, and cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from motet_planner.simulated import SimulatedRequest
from motet_shared.errors import ConfigError

HOUR = 3600.0


@dataclass(frozen=True, kw_only=True)
class Slo:
    """Define latency limits (service level objectives) in seconds; infinity: no limit.

    ttft: to the first token.
    itl: mean time between two tokens of a reply.
    """

    ttft: float = math.inf
    itl: float = math.inf

    def __post_init__(self) -> None:
        for name in ("ttft", "itl"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name):g}: give more than 0", param=name)


class Replicas:
    """Record the number of instances over time: `points` are (seconds, ready, requested)."""

    def __init__(self) -> None:
        self.points: list[tuple[float, int, int]] = []

    def note(self, now: float, ready: int, requested: int) -> None:
        """Record the numbers of ready and requested instances at a time."""
        if not self.points or self.points[-1][1:] != (ready, requested):
            self.points.append((now, ready, requested))

    @property
    def most(self) -> int:
        """Return the largest number of requested instances."""
        return max((requested for _, _, requested in self.points), default=0)


@dataclass
class SimulationOutcome:
    """Hold the result of a simulation; `jobs` stand for `sample` requests each.

    seconds: of the traffic.
    span: until the last reply was complete.
    instance_seconds: of all instances, start and end included.
    unserved: requests that found no instance in time.
    """

    jobs: list[SimulatedRequest]
    seconds: float
    span: float
    instance_seconds: float
    unserved: int
    replicas: Replicas
    sample: int = 1
    overhead: float = 0.0
    ttft: list[float] = field(default_factory=list)  # of all answered requests, ascending
    itl: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ttft = sorted(
            [job.first - job.at + self.overhead for job in self.jobs if job.first >= 0]
        )
        self.itl = sorted([gap(job) for job in self.jobs if job.ended >= 0 and job.output > 1])

    @property
    def requests(self) -> int:
        """Return the number of requests, unserved ones included."""
        return len(self.jobs) * self.sample

    @property
    def output_tokens(self) -> int:
        """Return the tokens of all replies."""
        return sum([job.output for job in self.jobs if job.ended >= 0]) * self.sample

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of all prompts."""
        return sum([job.prompt for job in self.jobs if job.ended >= 0]) * self.sample

    def kept(self, slo: Slo) -> int:
        """Return the number of requests that were answered within the limits."""
        late = slo.ttft - self.overhead
        return self.sample * sum(
            [
                job.ended >= 0 and job.first - job.at <= late and gap(job) <= slo.itl
                for job in self.jobs
            ]
        )

    def share(self, slo: Slo) -> float:
        """Return the share of requests that were answered within the limits; 1 without requests."""
        return self.kept(slo) / self.requests if self.jobs else 1.0

    def goodput(self, slo: Slo) -> float:
        """Return the requests per second that were answered within the limits."""
        return self.kept(slo) / self.seconds if self.seconds else 0.0

    @property
    def mean_instances(self) -> float:
        """Return the mean number of instances over the traffic."""
        return self.instance_seconds / self.span if self.span else 0.0

    def busiest(self, parts: int = 20) -> float:
        """Return the mean number of concurrent requests in the busiest part of the traffic.

        The traffic is divided into `parts` of equal length.
        """
        edges = [(job.at, 1) for job in self.jobs] + [
            (job.ended, -1) for job in self.jobs if job.ended >= 0
        ]
        length, streams, before = self.seconds / parts, 0, 0.0
        sums = [0.0] * parts
        for now, change in [*sorted(edges), (self.seconds, 0)]:
            while before < min(now, self.seconds):
                part = min(int(before / length), parts - 1)
                until = min(now, (part + 1) * length if part < parts - 1 else self.seconds)
                sums[part] += streams * (until - before)
                before = max(until, math.nextafter(before, math.inf))
            streams += change
        return max(sums) / length * self.sample

    def cost(self, per_hour: float) -> float:
        """Return the cost of all instances, at a price per instance and hour."""
        return self.instance_seconds / HOUR * per_hour

    def per_million(self, per_hour: float) -> tuple[float, float]:
        """Return the cost of a million tokens: of replies, and of prompts and replies together.

        Infinity where there are no tokens.
        """
        cost, generated = self.cost(per_hour), self.output_tokens
        return tuple(
            cost / count * 1e6 if count else math.inf
            for count in (generated, generated + self.prompt_tokens)
        )  # type: ignore[return-value]


def gap(job: SimulatedRequest) -> float:
    """Return the mean seconds between two tokens of the job's reply."""
    return (job.ended - job.first) / (job.output - 1) if job.output > 1 else 0.0
