"""A stretch of time of a stack: what each instance did in it, and where the replies that ended in it spent theirs."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from motet_shared.messages import Heartbeat

Timing = Mapping[str, float]  # of a reply: seconds by `<role>.<stage>`


@dataclass(frozen=True)
class Look:
    """What a directory knew at a time, in seconds of any clock."""

    time: float
    beats: Sequence[Heartbeat]


@dataclass(frozen=True)
class Seen:
    """An instance, by the heartbeats of it in the order in which they came: one at least."""

    beats: Sequence[Heartbeat]

    @property
    def last(self) -> Heartbeat:
        return self.beats[-1]

    @property
    def name(self) -> str:
        return self.last.instance

    @property
    def seconds(self) -> float:
        """Between the first heartbeat and the last, on the instance's own clock."""
        return self.growth("up")

    def now(self, name: str) -> float:
        """A number of the last heartbeat; 0 if it tells none."""
        return self.last.load.get(name, 0.0)

    def growth(self, name: str) -> float:
        """What a counter has grown by."""
        return max(0.0, self.now(name) - self.beats[0].load.get(name, 0.0))

    def rate(self, name: str) -> float:
        """The same per second; 0 where no time has passed."""
        return self.growth(name) / self.seconds if self.seconds > 0 else 0.0

    def mean(self, name: str) -> float:
        """Of a number that goes up and down."""
        return statistics.fmean(beat.load.get(name, 0.0) for beat in self.beats)

    def share(self, name: str, least: float = 0.0) -> float:
        """Of the heartbeats: those in which a number was more than `least`."""
        return statistics.fmean(beat.load.get(name, 0.0) > least for beat in self.beats)

    @property
    def loop(self) -> float:
        """How much of the time in which the thread of its event loop could have a core it computed: 1 is all of it."""
        return self.rate("loop_cpu") / max(1.0 - self.rate("loop_wait"), 0.05)


@dataclass(frozen=True)
class Window:
    """`machines`: instances by the machine that they share, those that do not know theirs by themselves."""

    instances: Sequence[Seen]
    timings: Sequence[Timing] = ()
    machines: Sequence[Sequence[Seen]] = field(default=())

    @classmethod
    def of(cls, looks: Iterable[Look], timings: Sequence[Timing] = ()) -> Window:
        """Of instances that are there at the end; what one of them was before it began anew counts for nothing."""
        beats: dict[str, list[Heartbeat]] = {}
        present: set[str] = set()
        for look in sorted(looks, key=lambda look: look.time):
            present = {beat.instance for beat in look.beats}
            for beat in look.beats:
                known = beats.setdefault(beat.instance, [])
                if not known or known[-1].seq != beat.seq:
                    known.append(beat)
        instances = [Seen(told) for name, told in sorted(beats.items()) if name in present]
        return cls(instances, timings, _by_machine(instances))

    def ready(self, role: str) -> list[Seen]:
        """Instances of a role that take work."""
        return [seen for seen in self.instances if seen.last.role == role and seen.last.state == "ready"]

    def by_model(self, role: str) -> dict[str, list[Seen]]:
        """Ready instances of a role by the name of what they serve."""
        groups: dict[str, list[Seen]] = {}
        for seen in self.ready(role):
            for card in seen.last.models:
                groups.setdefault(card.name, []).append(seen)
        return groups

    @property
    def requests(self) -> float:
        """Replies that were made at a time, on average: as gateways count them, or else as tokenizers do."""
        streams = sum(seen.mean("streams") for seen in self.ready("gateway"))
        return max(streams, sum(seen.mean("active") for seen in self.ready("tokenizer")))

    def stage(self, name: str) -> float:
        """Median seconds of a stage of a reply; 0 without any."""
        return statistics.median(timing.get(name, 0.0) for timing in self.timings) if self.timings else 0.0


def _by_machine(instances: Sequence[Seen]) -> list[list[Seen]]:
    known = [seen for seen in instances if "machine" in seen.last.load]
    known.sort(key=lambda seen: seen.now("machine"))
    return [list(group) for _, group in groupby(known, key=lambda seen: seen.now("machine"))]
