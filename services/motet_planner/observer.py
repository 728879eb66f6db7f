"""Sample groups from heartbeats: arrivals, load, instances, and measured cold starts."""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Iterable, Mapping

from motet_planner.groups import Group
from motet_planner.history import Sample
from motet_shared.messages import Heartbeat
from motet_shared.wire.discovery import Directory

_MAX_COLD_STARTS = 5  # cold starts that are kept
_EXPECTED_WITHIN = 1800.0  # seconds after which a requested instance is no longer expected
_COUNTERS = ("requests", "tokens")
_QUEUEING_ROLE = "tokenizer"  # the role whose requests wait for decode


class Observer:
    """Sample all groups, once per interval. Counters become increments since the last `observe`."""

    def __init__(self, directory: Directory, groups: Mapping[str, Group]):
        self._directory = directory
        self._groups = groups
        self._counted: dict[tuple[str, str], float] = {}  # (instance, counter): last value
        self._cold_starts = {name: _ColdStarts() for name in groups}
        self._first = True

    def record_request(self, name: str, count: int, now: float) -> None:
        """Note that `count` more instances of a group were requested now (negative: fewer)."""
        self._cold_starts[name].requested(count, now)

    def observe(self, now: float) -> dict[str, Sample]:
        """Return a sample of each group. `now`: seconds of the caller's clock."""
        grown = self._growth()
        found = {name: self._sample(group, now, grown) for name, group in self._groups.items()}
        self._first = False
        return found

    def _sample(self, group: Group, now: float, grown: Mapping[tuple[str, str], float]) -> Sample:
        beats = self._members(group)
        active = sum(beat.load.get("active", 0.0) for beat in beats)
        queued = min(active, sum(beat.load.get("queued", 0.0) for beat in beats))
        tokenizers = self._directory.instances(_QUEUEING_ROLE) if group.role == "decode" else []
        held = f"waiting_for_decode/{group.model}" if group.model else "waiting_for_decode"
        starts = self._cold_starts[group.name]
        starts.observe(
            [beat.instance for beat in beats if beat.state == "ready"],
            now,
            known_before=self._first,
        )
        return Sample(
            at=now,
            arrivals=round(sum(grown.get((beat.instance, "requests"), 0.0) for beat in beats)),
            running=active - queued,
            waiting=queued + sum(beat.load.get(held, 0.0) for beat in tokenizers),
            tokens=sum(grown.get((beat.instance, "tokens"), 0.0) for beat in tokenizers),
            ready=sum(beat.state == "ready" for beat in beats),
            starting=sum(beat.state in ("starting", "warming") for beat in beats),
            cold_start=starts.seconds,
        )

    def _members(self, group: Group) -> list[Heartbeat]:
        """Return the heartbeats of a group's instances.

        An instance that has not loaded its model yet reports none; it then belongs to the role's
        group if there is only one.
        """
        share_alone = sum(other.role == group.role for other in self._groups.values()) == 1
        return [
            beat
            for beat in self._directory.instances(group.role)
            if not group.model
            or any(card.name == group.model for card in beat.models)
            or (share_alone and not beat.models and beat.state != "ready")
        ]

    def _growth(self) -> dict[tuple[str, str], float]:
        """Return the increments of all counters.

        What an instance counted before this process's first observation is ignored.
        """
        roles = {group.role for group in self._groups.values()} | {_QUEUEING_ROLE}
        beats = [beat for role in roles for beat in self._directory.instances(role)]
        now = {
            (beat.instance, name): value
            for beat in beats
            for name, value in beat.load.items()
            if name in _COUNTERS
        }
        before, self._counted = self._counted, now
        return (
            {}
            if self._first
            else {key: max(0.0, value - before.get(key, 0.0)) for key, value in now.items()}
        )


class _ColdStarts:
    """Measure how long instances of a group take from being requested until ready."""

    def __init__(self) -> None:
        self._requested: deque[float] = deque()
        self._ready: set[str] = set()
        self._durations: deque[float] = deque(maxlen=_MAX_COLD_STARTS)

    @property
    def seconds(self) -> float:
        """Return the median cold start in seconds; 0: none was measured yet."""
        return statistics.median(self._durations) if self._durations else 0.0

    def requested(self, count: int, now: float) -> None:
        if count > 0:
            self._requested.extend([now] * count)
        for _ in range(min(-count, len(self._requested))):
            self._requested.pop()

    def observe(self, ready: Iterable[str], now: float, known_before: bool) -> None:
        """Note the ready instances. `known_before`: they were ready when the planner started."""
        before, self._ready = self._ready, set(ready)
        new_instances = self._ready - before
        while self._requested and self._requested[0] < now - _EXPECTED_WITHIN:
            self._requested.popleft()
        for _ in range(0 if known_before else min(len(new_instances), len(self._requested))):
            self._durations.append(now - self._requested.popleft())
