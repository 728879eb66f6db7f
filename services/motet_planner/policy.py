"""Decide how many instances a role needs: pure rules, without a clock and without I/O.

The service and the simulator run this same code, so that a policy does in service what was
simulated.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, fields
from typing import Any

from motet_planner.history import History, Sample
from motet_shared.errors import ConfigError

_TINY = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class RolePolicy:
    """Hold the scaling policy of a role, in seconds, instances and requests.

    The policy is target tracking, as of Kubernetes' Horizontal Pod Autoscaler (desired = ⌈load /
    target⌉), with a burst window, a forecast over a cold start, hysteresis and a stabilization
    delay for scaling down:

        need = max(mean outstanding(window) / target, mean outstanding(burst_window) / (target · headroom),
                   forecast running(cold_start) / target, tokens per second(window) / tokens)
        up:   ⌈need⌉ at once, at most step_up more
        down: the largest need within scale_down_delay, if it fits fewer instances with `slack` to spare

    min, max: instances. min=0: scale to zero while there are no requests.
    target: requests that an instance is to serve at a time, waiting ones included.
    tokens: tokens per second that an instance generates at most; 0 disables token-based scaling.
    window: over which the load is averaged.
    burst_window: the same for sudden load.
    headroom: multiple of its target that an instance may serve during a burst.
    scale_down_delay: how long an instance must not have been needed before it is removed.
    slack: share by which the load must be below the capacity of one fewer: prevents oscillation.
    cold_start: from asking for an instance until it is ready; a measured value takes precedence.
    step_up, step_down: most instances per decision; where there are many, their number or a quarter
        of it.
    """

    min: int = 1
    max: int = 8
    target: float = 8.0
    tokens: float = 0.0
    window: float = 60.0
    burst_window: float = 6.0
    headroom: float = 1.5
    scale_down_delay: float = 300.0
    slack: float = 0.1
    cold_start: float = 30.0
    step_up: int = 4
    step_down: int = 1

    def __post_init__(self) -> None:
        least: dict[str, Any] = {
            name: 0 for name in ("min", "tokens", "scale_down_delay", "slack", "cold_start")
        }
        least |= {name: 1 for name in ("max", "headroom", "step_up", "step_down")}
        for field in fields(self):
            value, low = getattr(self, field.name), least.get(field.name)
            if not math.isfinite(value) or (value <= 0 if low is None else value < low):
                remedy = "more than 0" if low is None else f"at least {low}"
                raise ConfigError(f"{field.name}={value:g}: give {remedy}", param=field.name)
        if self.min > self.max:
            raise ConfigError(
                f"min={self.min}: is more than max={self.max}; give at most that", param="min"
            )
        if self.burst_window > self.window:
            raise ConfigError(
                f"burst_window={self.burst_window:g}: is longer than window={self.window:g}; give at most that",
                param="burst_window",
            )


@dataclass(frozen=True, slots=True)
class InstanceDemand:
    """Express by criterion how many instances would just suffice, as a fraction.

    steady: concurrent requests, over the window.
    burst: the same over the burst window, with headroom.
    forecast: concurrent requests expected after a cold start.
    present: nearly 0 while there are requests, which rounds up to one instance.
    """

    steady: float  # concurrent requests, over the window
    burst: float  # the same over the burst window, with headroom
    forecast: float  # concurrent requests expected after a cold start
    tokens: float
    present: float  # nearly 0 while there are requests: rounds up to one instance

    def largest(self) -> tuple[float, str]:
        """Return the largest demand and its name."""
        names = ("steady", "burst", "forecast", "tokens", "present")  # the first wins a tie
        name = max(names, key=lambda each: getattr(self, each))
        return getattr(self, name), name


@dataclass(frozen=True, slots=True)
class Decision:
    """Decide on `target` instances for a reason; `before`: the previous target."""

    target: int
    before: int
    reason: str
    demand: InstanceDemand


class Policy:
    """Decide for one role. Call `decide` once per interval, with a sample of that interval."""

    def __init__(self, settings: RolePolicy):
        self.settings = settings
        self.target: int | None = None  # None: before the first decision
        self._history = History(settings.window)
        self._needs: deque[tuple[float, float]] = deque()  # (when, instances), strictly decreasing

    def decide(self, sample: Sample) -> Decision:
        """Decide on the number of instances; the first decision starts from the number found."""
        self._history.add(sample)
        before = self._first(sample) if self.target is None else self.target
        demand = self._demand(sample)
        need, name = demand.largest()
        held = self._hold(sample, need)
        if (needed := math.ceil(need - _TINY)) > before:
            wanted, reason = self._up(before, needed, name)
        else:
            wanted, reason = self._down(before, held, sample)
        self.target = min(max(wanted, self.settings.min), self.settings.max)
        if self.target != wanted:
            reason += f"; {wanted} wanted, but {'min' if self.target > wanted else 'max'} is {self.target}"
        return Decision(self.target, before, reason, demand)

    def _first(self, sample: Sample) -> int:
        """Return the instances found at first.

        They count as needed until now, as history is unknown.
        """
        there = sample.ready + sample.starting
        self._needs.append((sample.at, float(there)))
        return there

    # -------------------------------------------------------------------------------------- reading
    def _demand(self, sample: Sample) -> InstanceDemand:
        settings, history = self.settings, self._history
        ahead = history.forecast_running(settings.window, self._cold_start(sample))
        generated = history.tokens(settings.window) / settings.tokens if settings.tokens else 0.0
        return InstanceDemand(
            steady=history.outstanding(settings.window) / settings.target,
            burst=history.outstanding(settings.burst_window) / settings.target / settings.headroom,
            forecast=ahead / settings.target,
            tokens=generated,
            present=1e-6 if history.has_requests(settings.window) else 0.0,
        )

    def _cold_start(self, sample: Sample) -> float:
        return sample.cold_start or self.settings.cold_start

    def _hold(self, sample: Sample, need: float) -> float:
        """Return the largest need within the scale-down delay, or within a longer cold start."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((sample.at, need))
        since = sample.at - max(self.settings.scale_down_delay, self._cold_start(sample))
        while self._needs[0][0] < since:
            self._needs.popleft()
        return self._needs[0][1]

    # ------------------------------------------------------------------------------------- deciding
    def _up(self, before: int, needed: int, name: str) -> tuple[int, str]:
        most = before + max(self.settings.step_up, before)
        if needed > most:
            return most, f"{name} load needs {needed}, a step goes to {most}"
        return needed, f"{name} load needs {needed}"

    def _down(self, before: int, held: float, sample: Sample) -> tuple[int, str]:
        enough = math.ceil(held * (1 + self.settings.slack) - _TINY)
        if enough >= before:
            return before, "enough"
        target = max(enough, before - max(self.settings.step_down, before // 4))
        delay = max(self.settings.scale_down_delay, self._cold_start(sample))
        return target, f"no more than {enough} were needed for {delay:g} s"
