"""Run the planner actor, role `planner`: observe every group once per interval and scale it."""

from __future__ import annotations

import asyncio
import logging
import math
from dataclasses import replace
from typing import Any

from motet_planner.actuators.actuator import Actuator, ActuatorError, DryRun
from motet_planner.actuators.kubernetes import Cluster, Kubernetes
from motet_planner.actuators.program import Compose, Local, parse_command
from motet_planner.config import PlannerConfig
from motet_planner.groups import Group, check_local, read_groups
from motet_planner.history import Sample
from motet_planner.observer import Observer
from motet_planner.policy import Decision, Policy
from motet_shared.messages import ListTargets, ScalingTarget
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.discovery import HEARTBEAT_EVERY

log = logging.getLogger(__name__)

_DISCOVERY_SECONDS = (
    3 * HEARTBEAT_EVERY
)  # seconds in which every live instance has sent a heartbeat


class Planner(Actor):
    """Scale the groups.

    One planner should run; a second one decides alike, from its own observations.
    """

    role = "planner"
    config: PlannerConfig

    def __init__(self, config: PlannerConfig, bus: Bus, actuator: Actuator | None = None):
        super().__init__(config, bus)
        self.groups = read_groups(config.roles)
        if config.actuator == "local":
            check_local(self.groups)
        self._actuator = actuator or _actuator(config)
        self._observer = Observer(bus.directory, self.groups)
        self._policies = {name: Policy(group.policy) for name, group in self.groups.items()}
        self._latest: dict[str, tuple[Sample, Decision]] = {}
        self._requested: dict[
            str, tuple[int, float]
        ] = {}  # target last sent to the actuator, and when
        self._counts = {"observations": 0, "changes": 0, "failures": 0}
        self._first_observation = math.inf
        self._task: asyncio.Task[None] | None = None
        self._acting: dict[
            str, asyncio.Task[None]
        ] = {}  # by group; scaling may take minutes and must not delay observations

    async def warm(self) -> None:
        self._task = asyncio.create_task(self._observe_periodically(), name="planner")
        self._task.add_done_callback(self._on_task_done)

    async def close(self) -> None:
        tasks = [*self._acting.values(), *([self._task] if self._task is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._actuator.close()

    @operation(ListTargets)
    async def list_targets(self, call: Call, request: ListTargets) -> None:
        """Send a `ScalingTarget` of each group, as of the last observation."""
        for name, (sample, decision) in self._latest.items():
            await call.send(
                ScalingTarget(
                    group=name,
                    role=self.groups[name].role,
                    target=decision.target,
                    ready=sample.ready,
                    starting=sample.starting,
                    reason=decision.reason,
                    demand={
                        key: getattr(decision.demand, key)
                        for key in decision.demand.__dataclass_fields__
                    },
                    cold_start=sample.cold_start,
                )
            )
        call.finish("stop")

    def load(self) -> dict[str, float]:
        return {
            f"target/{name}": float(decision.target) for name, (_, decision) in self._latest.items()
        }

    def stats(self) -> dict[str, Any]:
        latest = self._latest.items()
        return self._counts | {
            "target_instances": {name: decision.target for name, (_, decision) in latest},
            "ready_instances": {name: sample.ready for name, (sample, _) in latest},
            "outstanding_requests": {name: sample.outstanding for name, (sample, _) in latest},
            "cold_start_seconds": {name: sample.cold_start for name, (sample, _) in latest},
        }

    # --------------------------------------------------------------------------------- observations
    def _on_task_done(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.crash(error)

    async def _observe_periodically(self) -> None:
        clock = asyncio.get_running_loop()
        await asyncio.sleep(max(_DISCOVERY_SECONDS, self.config.interval))
        due = clock.time()
        while True:
            await self.observe(clock.time())
            due = max(due + self.config.interval, clock.time())
            await asyncio.sleep(due - clock.time())

    async def observe(self, now: float) -> None:
        """Observe every group, decide, and act."""
        self._counts["observations"] += 1
        self._first_observation = min(self._first_observation, now)
        for name, sample in self._observer.observe(now).items():
            policy = self._policies[name]
            if policy.target is None and now < self._first_observation + self._settling(
                self.groups[name]
            ):
                continue
            if policy.target is None:
                sample = await self._with_requested(self.groups[name], sample)
            decision = policy.decide(sample)
            self._latest[name] = sample, decision
            self._act(self.groups[name], decision, now)

    def _settling(self, group: Group) -> float:
        """Return the seconds before a group's first decision.

        A `motet up` starts all instances together, and none is known before its first heartbeat.
        """
        return group.policy.cold_start if self.config.actuator == "local" else 0.0

    async def settled(self) -> None:
        """Wait until the actuator has carried out all requests."""
        await asyncio.gather(*self._acting.values())

    async def _with_requested(self, group: Group, sample: Sample) -> Sample:
        """Count instances that the actuator has but that sent no heartbeat yet as starting.

        For the first decision of a group.
        """
        try:
            count = await self._actuator.count(group.deployment)
        except ActuatorError as error:
            self._failed(group, error)
            count = None
        silent = (count or 0) - sample.ready - sample.starting
        return sample if silent <= 0 else replace(sample, starting=sample.starting + silent)

    def _act(self, group: Group, decision: Decision, now: float) -> None:
        current = self._acting.get(group.name)
        requested, when = self._requested.get(group.name, (decision.before, -self.config.insist))
        is_new = decision.target != requested or now - when >= self.config.insist
        if not is_new or (current is not None and not current.done()):
            return
        if decision.target != requested:
            self._counts["changes"] += 1
            log.info(
                "%s: %d → %d instances: %s", group.name, requested, decision.target, decision.reason
            )
        task = asyncio.create_task(
            self._scale(group, decision.target, requested, now), name=f"scale {group.name}"
        )
        task.add_done_callback(self._on_task_done)
        self._acting[group.name] = task

    async def _scale(self, group: Group, target: int, requested: int, now: float) -> None:
        self._observer.record_request(group.name, target - requested, now)
        try:
            await self._actuator.scale(group.deployment, target)
        except ActuatorError as error:
            self._observer.record_request(group.name, requested - target, now)
            self._failed(group, error)
        else:
            self._requested[group.name] = target, now

    def _failed(self, group: Group, error: ActuatorError) -> None:
        self._counts["failures"] += 1
        log.error("%s: %s", group.name, error.message)


def _actuator(config: PlannerConfig) -> Actuator:
    if config.actuator == "compose":
        return Compose(parse_command(config.compose, "compose"))
    if config.actuator == "kubernetes":
        return Kubernetes(Cluster.of_this_pod())
    if config.actuator == "local":
        return Local(config.url)
    return DryRun()
