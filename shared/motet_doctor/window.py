"""Summarize a stack over a stretch of time: each instance's activity, and reply timings."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from motet_shared.messages import Heartbeat

Timing = Mapping[str, float]  # of one reply: seconds by `<role>.<stage>`


@dataclass(frozen=True)
class Snapshot:
    """Hold the heartbeats of a directory at a time, in seconds of any clock."""

    time: float
    heartbeats: Sequence[Heartbeat]


@dataclass(frozen=True)
class InstanceWindow:
    """Hold the heartbeats of one instance in order of arrival, at least one."""

    heartbeats: Sequence[Heartbeat]

    @property
    def last(self) -> Heartbeat:
        """Return the last heartbeat."""
        return self.heartbeats[-1]

    @property
    def name(self) -> str:
        """Return the instance id."""
        return self.last.instance

    @property
    def seconds(self) -> float:
        """Return the seconds between the first and last heartbeat, on the instance's own clock."""
        return self.growth("uptime")

    def now(self, name: str) -> float:
        """Return a value of the last heartbeat's load, 0 if absent."""
        return self.last.load.get(name, 0.0)

    def growth(self, name: str) -> float:
        """Return the growth of a counter."""
        return max(0.0, self.now(name) - self.heartbeats[0].load.get(name, 0.0))

    def rate(self, name: str) -> float:
        """Return the growth of a counter per second, 0 if no time has passed."""
        return self.growth(name) / self.seconds if self.seconds > 0 else 0.0

    def mean(self, name: str) -> float:
        """Return the mean of a gauge over all heartbeats."""
        return statistics.fmean(heartbeat.load.get(name, 0.0) for heartbeat in self.heartbeats)

    def share(self, name: str, least: float = 0.0) -> float:
        """Return the share of heartbeats in which a value was more than `least`."""
        return statistics.fmean(
            heartbeat.load.get(name, 0.0) > least for heartbeat in self.heartbeats
        )

    @property
    def loop(self) -> float:
        """Return the utilization of the event loop's thread; 1: saturated.

        It is relative to the time in which the thread could have a core.
        """
        return self.rate("loop_cpu") / max(1.0 - self.rate("loop_wait"), 0.05)


@dataclass(frozen=True)
class ObservationWindow:
    """Hold the state of a stack over a stretch of time.

    `machines` groups instances that share a machine; those whose machine is unknown are left out.
    """

    instances: Sequence[InstanceWindow]
    timings: Sequence[Timing] = ()
    machines: Sequence[Sequence[InstanceWindow]] = field(default=())

    @classmethod
    def of(cls, snapshots: Iterable[Snapshot], timings: Sequence[Timing] = ()) -> ObservationWindow:
        """Build a window of the instances in the last snapshot.

        Instances that left before are ignored; repeated heartbeats (with equal `seq`) are dropped.
        """
        heartbeats: dict[str, list[Heartbeat]] = {}
        present: set[str] = set()
        for snapshot in sorted(snapshots, key=lambda snapshot: snapshot.time):
            present = {heartbeat.instance for heartbeat in snapshot.heartbeats}
            for heartbeat in snapshot.heartbeats:
                known = heartbeats.setdefault(heartbeat.instance, [])
                if not known or known[-1].seq != heartbeat.seq:
                    known.append(heartbeat)
        instances = [
            InstanceWindow(history)
            for name, history in sorted(heartbeats.items())
            if name in present
        ]
        return cls(instances, timings, _by_machine(instances))

    def ready(self, role: str) -> list[InstanceWindow]:
        """Return the instances of a role that take work."""
        return [
            instance
            for instance in self.instances
            if instance.last.role == role and instance.last.state == "ready"
        ]

    def by_model(self, role: str) -> dict[str, list[InstanceWindow]]:
        """Return the ready instances of a role by model name."""
        groups: dict[str, list[InstanceWindow]] = {}
        for instance in self.ready(role):
            for card in instance.last.models:
                groups.setdefault(card.name, []).append(instance)
        return groups

    @property
    def requests(self) -> float:
        """Return the mean number of concurrent replies, as counted by gateways or by tokenizers."""
        streams = sum(instance.mean("streams") for instance in self.ready("gateway"))
        return max(streams, sum(instance.mean("active") for instance in self.ready("tokenizer")))

    def stage(self, name: str) -> float:
        """Return the median seconds of a stage of a reply; 0 without replies."""
        return (
            statistics.median(timing.get(name, 0.0) for timing in self.timings)
            if self.timings
            else 0.0
        )


def _by_machine(instances: Sequence[InstanceWindow]) -> list[list[InstanceWindow]]:
    known = [instance for instance in instances if "machine_id" in instance.last.load]
    known.sort(key=lambda instance: instance.now("machine_id"))
    return [
        list(group) for _, group in groupby(known, key=lambda instance: instance.now("machine_id"))
    ]
