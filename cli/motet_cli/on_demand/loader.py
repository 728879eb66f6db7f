"""Load and unload models of a running stack: carry out `residency`'s decisions.

It sees from heartbeats which models requests wait for and which are idle, starts and stops the
processes of models through the supervisor, and announces in heartbeats of its own where each
stands, which gateways and tokenizers read.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from motet_cli.on_demand.prepared import FilesState, PreparedModels, state_of
from motet_cli.on_demand.residency import Model, Residency, Stage
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.nursery import NotForked
from motet_cli.supervision.stack_bus import bus_config
from motet_cli.supervision.supervisor import Slot, Supervisor
from motet_shared.messages import Heartbeat, Offer
from motet_shared.process.exits import identity_of
from motet_shared.wire.bus import Bus, keep_key, wanted_key
from motet_shared.wire.discovery import Directory

PERIOD = 0.1  # seconds between two looks without a heartbeat
# Seconds from a start or the last stage of a model to a preparation, which leaves the first token
# alone.
PAUSE = 0.2
PREPARATION = 0.5  # seconds that a preparation takes about
DRAIN = 600.0  # seconds that the streams of a model that leaves have to end
START_SECONDS = 4.0  # of a start, besides reading the weights, before one was measured
READ_RATE = 400e6  # bytes per second, before a start was measured
MAX_SHARE = 0.99  # of a start that takes longer than expected


@dataclass(kw_only=True, eq=False)
class OnDemandModel:
    """Describe the processes of a model, and where it stands.

    weights: bytes on disk. folder: of its files; None: they are not watched. videos: it makes
    videos. start: seconds of its last start; 0: not measured yet.
    """

    model: Model
    specs: tuple[ChildSpec, ...]
    weights: int
    folder: Path | None = None
    videos: bool = False
    start: float = 0.0

    @property
    def roles(self) -> list[str]:
        return list(dict.fromkeys(spec.role for spec in self.specs))

    def files(self) -> FilesState:
        """Return what changes with the model's files, for `PreparedModels`."""
        return frozenset() if self.folder is None else state_of(self.folder)

    @property
    def expected_start(self) -> float:
        """Return the estimated seconds of a start."""
        return self.start or START_SECONDS + self.weights / READ_RATE

    def offers(self, now: float) -> list[Offer]:
        """Return what callers may know of it, for each role."""
        model, expected = self.model, self.expected_start
        share, left = 0.0, expected
        if model.stage == "loading":
            share = min((now - model.changed) / expected, MAX_SHARE)
            left = max(expected * (1 - share), 0.1)
        elif model.stage == "ready":
            share, left = 1.0, 0.0
        stay = round(model.left(now), 1) if model.stage == "ready" else -1.0
        stay = -1.0 if math.isinf(stay) else stay
        return [
            Offer(
                role=role,
                model=model.name,
                stage=model.stage,
                share=round(share, 2),
                seconds=round(left, 1),
                problem=model.problem if model.stage == "failed" else "",
                stay=stay,
                videos=self.videos,
            )
            for role in self.roles
        ]


class Loader:
    """Run the models of a stack that are loaded on demand, from `run` to its cancellation."""

    def __init__(
        self,
        supervisor: Supervisor,
        models: Sequence[OnDemandModel],
        residency: Residency,
        report: Callable[[str], None],
        prepared: PreparedModels,
    ):
        self._supervisor, self._residency, self._report = supervisor, residency, report
        self._prepared = prepared
        self._preparing: asyncio.Task[None] | None = None
        self._prepares = False
        self._models = {one.model.name: one for one in models}
        self._kept: dict[tuple[str, str], float] = {}  # announcements, by instance and key
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended = asyncio.Event()  # set when the processes of a model have ended

    async def run(self, connection: NatsAccess) -> None:
        """Announce the models and follow requests for them; never return."""
        config = bus_config(connection)
        bus = await Bus.connect(config.instance_id("operator"), config)
        loop = asyncio.get_running_loop()
        bus.offers = lambda: [
            offer for one in self._models.values() for offer in one.offers(loop.time())
        ]
        self._take_over(loop.time())
        bus.set_state("ready")
        try:
            while True:
                if self._step(bus.directory.everyone(), loop.time()):
                    bus.heartbeat()
                await self._news(bus.directory)
        finally:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._prepared.close()
            await bus.close()

    def _take_over(self, now: float) -> None:
        """Set the stages of the models whose processes an earlier supervisor has left."""
        for one in self._models.values():
            slots = self._slots(one)
            if _staying(slots):
                one.model.enter("loading", now)
            elif slots:
                one.model.enter("leaving", now)
                self._run(self._await_end(one, slots), f"end {one.model.name}")

    async def _await_end(self, one: OnDemandModel, slots: Sequence[Slot]) -> None:
        """Wait until the processes are removed of a model that an earlier supervisor has unloaded."""
        while set(slots) & set(self._supervisor.slots):  # noqa: ASYNC110 - no event tells it
            await asyncio.sleep(PERIOD)
        self._remove(one, DRAIN, "absent")

    def begin_to_prepare(self) -> None:
        """Prepare models from now on: what is to be ready at the start is not delayed any more."""
        self._prepares = True

    async def renew(self) -> None:
        """Prepare models anew, after a change of what their processes have read."""
        await self._prepared.clear()

    async def _news(self, directory: Directory) -> None:
        """Wait for a heartbeat, the end of a model's processes, or the end of PERIOD."""
        waits = [
            asyncio.ensure_future(wait) for wait in (directory.changed(PERIOD), self._ended.wait())
        ]
        try:
            await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for wait in waits:
                wait.cancel()
        self._ended.clear()

    def _step(self, beats: Sequence[Heartbeat], now: float) -> bool:
        """Observe, decide and act; return True if a stage has changed."""
        before = [one.model.stage for one in self._models.values()]
        wanted: Counter[str] = Counter()
        for beat in beats:
            wanted.update({k: int(v) for k, v in beat.load.items() if k.startswith("wanted/")})
        self.follow(beats)
        by_instance = {beat.instance: beat for beat in beats}
        for one in self._models.values():
            self._observe(one, wanted, by_instance, now)
        for action, model in self._residency.decide(now):
            one = self._models[model.name]
            if action == "load":
                self._load(one)
            else:
                self._unload(one)
        self._prepare_next(now)
        return before != [one.model.stage for one in self._models.values()]

    def follow(self, beats: Sequence[Heartbeat]) -> None:
        """Take over how long models are to stay, once for each announcement."""
        announced = {
            (beat.instance, key): value
            for beat in beats
            for key, value in beat.load.items()
            if key.startswith("keep/")
        }
        new = {key: value for (_, key), value in sorted(announced.items() - self._kept.items())}
        self._kept = announced
        for one in self._models.values():
            for role in one.roles:
                if (seconds := new.get(keep_key(role, one.model.name))) is not None:
                    one.model.asked = math.inf if seconds < 0 else seconds

    def _observe(
        self, one: OnDemandModel, wanted: Counter[str], beats: Mapping[str, Heartbeat], now: float
    ) -> None:
        model, slots = one.model, self._slots(one)
        here = [beats.get(slot.child.instance) for slot in slots if slot.child is not None]
        known = [beat for beat in here if beat is not None]
        active = sum(int(beat.load.get("active", 0)) for beat in known)
        staying = _staying(slots)
        model.note(sum(wanted[wanted_key(role, model.name)] for role in one.roles), active, now)
        if model.stage == "loading":
            if all(_is_ready(slot, beats) for slot in staying):
                one.start = now - model.changed
                model.enter("ready", now)
                self._report(f"{model.name}: loaded in {one.start:.2f} s")
                self._run(self._prepare(one), f"prepare {model.name}")
            elif any(slot.last_exit for slot in staying):
                self._fail(one, now)
        elif model.stage == "ready" and _lacks_a_role(staying):
            self._fail(one, now)

    def _slots(self, one: OnDemandModel) -> list[Slot]:
        """Return the processes of a model; `motet restart` and `motet scale` may change them."""
        return [
            slot
            for slot in self._supervisor.slots
            if slot.spec.model == one.model.name and slot.spec.role in one.roles
        ]

    def _load(self, one: OnDemandModel) -> None:
        self._report(f"{one.model.name}: loading")
        ending = self._ending()
        if not self._prepared.take(one.model.name, ending, one.files()):
            text = ",".join(ending)
            self._supervisor.start(
                replace(spec, env={**spec.env, "MOTET_WAIT_FOR_EXIT": text}) for spec in one.specs
            )

    def _ending(self) -> list[str]:
        """Return the processes of models whose streams have ended, whose memory the next one takes."""
        ending = [one for one in self._models.values() if one.model.is_ending]
        pids = [slot.child.pid for one in ending for slot in self._slots(one) if slot.child]
        return [identity for pid in pids if (identity := identity_of(pid)) is not None]

    def _unload(self, one: OnDemandModel) -> None:
        streams = f", {one.model.active} streams end first" if one.model.active else ""
        self._report(f"{one.model.name}: leaving{streams}")
        self._remove(one, DRAIN, "absent")

    def _fail(self, one: OnDemandModel, now: float) -> None:
        slot = next(slot for slot in self._slots(one) if slot.last_exit)
        tail = list(slot.child.tail)[-1:] if slot.child is not None else []
        one.model.problem = "; ".join([slot.last_exit, *tail])[:400]
        self._report(f"{one.model.name}: cannot be loaded: {one.model.problem}")
        one.model.enter("leaving", now)
        self._remove(one, 0.0, "failed")

    def _remove(self, one: OnDemandModel, drain: float, then: Stage) -> None:
        """Stop the processes of a model; it is in the stage `then` when they have ended."""

        async def remove() -> None:
            while slots := self._slots(one):  # a restart may have added another meanwhile
                await asyncio.gather(*(self._supervisor.remove(slot, drain) for slot in slots))
            one.model.enter(then, asyncio.get_running_loop().time())
            self._ended.set()

        self._run(remove(), f"unload {one.model.name}")

    def _prepare_next(self, now: float) -> None:
        """Begin to prepare the model that was used last among those that are not, at a quiet time."""
        if (
            not (self._prepares and self._supervisor.forks_aside)
            or len(self._prepared) >= self._prepared.limit
        ):
            return
        if self._preparing is not None and not self._preparing.done():
            return
        models = self._models.values()
        if any(one.model.stage not in ("absent", "ready", "failed") for one in models) or any(
            now - one.model.changed < PAUSE for one in models
        ):
            return
        waiting = [
            one
            for one in models
            if one.model.stage == "absent"
            and one.model.name not in self._prepared
            and not self._prepared.has_failed(one.model.name, one.files)
            and all(spec.forks and not spec.gpus for spec in one.specs)
        ]
        if waiting:
            one = max(waiting, key=lambda one: one.model.used)
            self._preparing = self._run(self._add_prepared(one), f"prepare {one.model.name}")

    async def _add_prepared(self, one: OnDemandModel) -> None:
        """Prepare one model; leave the time of a preparation to the others before the next."""
        try:
            await self._prepared.add(one.model.name, one.specs, one.files())
        except (NotForked, OSError) as error:
            self._report(f"{one.model.name} is not prepared: {error}")
            self._prepared.limit = 0
        if (
            one.model.stage != "absent"
        ):  # a request has come meanwhile, and another process serves it
            await self._prepared.drop(one.model.name)
        await asyncio.sleep(PREPARATION)

    async def _prepare(self, one: OnDemandModel) -> None:
        """Have processes forked in advance in the place of those that a model has taken."""
        await asyncio.sleep(PAUSE)
        await self._supervisor.prepare(one.specs)

    def _run(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _staying(slots: Sequence[Slot]) -> list[Slot]:
    """Return the processes that were not told to end, which only finish what they have begun."""
    return [slot for slot in slots if slot.state != "leaving"]


def _is_ready(slot: Slot, beats: Mapping[str, Heartbeat]) -> bool:
    beat = None if slot.child is None else beats.get(slot.child.instance)
    return beat is not None and beat.state == "ready"


def _lacks_a_role(slots: Sequence[Slot]) -> bool:
    """Return True if a process keeps ending, and no other one of its role runs."""
    running = {slot.spec.role for slot in slots if slot.state == "running"}
    return any(slot.state == "failing" and slot.spec.role not in running for slot in slots)
