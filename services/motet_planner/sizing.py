"""Find how many instances a traffic needs and what they cost, fixed or scaled by the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from motet_planner.outcome import SimulationOutcome, Slo
from motet_planner.policy import RolePolicy
from motet_planner.simulator import Scenario, simulate
from motet_planner.speed import Speed
from motet_planner.traffic import Arrival

_HEADROOM = 0.9  # target streams of an instance, as a share of the most it can serve


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Describe traffic, and the limits within which it is to be answered.

    traffic: returns the requests anew at each call, one in `sample` of them.
    seconds: how long requests arrive.
    share: of requests that are to be answered within the limits.
    """

    traffic: Callable[[], Iterable[Arrival]]
    seconds: float
    slo: Slo
    share: float = 0.99
    sample: int = 1


@dataclass(frozen=True, kw_only=True)
class Sizing:
    """Hold the result of sizing, fixed and scaled.

    fixed: with the fewest `instances` that keep the limits all the time.
    scaled: under the policy.
    streams: of each fixed instance in the busiest part, the most with which the limits are kept.
    """

    instances: int
    streams: float
    fixed: SimulationOutcome
    policy: RolePolicy
    scaled: SimulationOutcome


def size(demand: Demand, speed: Speed, cold_start: float) -> Sizing | None:
    """Size a fleet for `demand`.

    Returns None if no number of instances suffices: too many requests miss the SLO even alone.
    """
    if share_alone(demand, speed) < demand.share:
        return None
    instances, fixed = smallest(demand, speed)
    streams = fixed.busiest() / instances
    target = max(0.1, _HEADROOM * streams)
    policy = RolePolicy(min=1, max=2 * instances, target=target, cold_start=cold_start)
    begin = Scenario(
        speed=speed, policy=policy, instances=instances, cold_start=cold_start, sample=demand.sample
    )
    scaled = simulate(begin, demand.traffic(), demand.seconds)
    return Sizing(instances=instances, streams=streams, fixed=fixed, policy=policy, scaled=scaled)


def share_alone(demand: Demand, speed: Speed) -> float:
    """Return the share of requests within the limits if each had an instance of its own."""
    kept = count = 0
    slow = speed.step(1) > demand.slo.itl
    for request in demand.traffic():
        count += 1
        first = request.prompt * (1 - speed.cached) * speed.prefill_token + speed.overhead
        kept += first <= demand.slo.ttft and not (slow and request.output > 1)
    return kept / count if count else 1.0


def smallest(demand: Demand, speed: Speed) -> tuple[int, SimulationOutcome]:
    """Return the fewest instances, a multiple of `sample`, that keep the limits all the time."""
    scenario = {"speed": speed, "max_wait": float("inf"), "sample": demand.sample}
    tried: dict[int, SimulationOutcome] = {}

    def enough(cells: int) -> bool:
        begin = Scenario(instances=cells * demand.sample, **scenario)  # type: ignore[arg-type]
        tried[cells] = simulate(begin, demand.traffic(), demand.seconds)
        return tried[cells].share(demand.slo) >= demand.share

    low, high = 0, _initial_instances(demand, speed)
    while not enough(high):
        low, high = high, high + max(1, high // 2)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high * demand.sample, tried[high]


def _initial_instances(demand: Demand, speed: Speed) -> int:
    """Return the instances, in units of `sample`, that are always busy if every step is full."""
    most = min(speed.max_running, speed.sequences_within(demand.slo.itl) or 1)
    token = speed.step(most) / most
    busy = sum(
        r.prompt * (1 - speed.cached) * speed.prefill_token + r.output * token
        for r in demand.traffic()
    )
    return max(1, round(busy / demand.seconds))
