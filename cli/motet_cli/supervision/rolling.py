"""Replace and scale the processes of a running stack without interrupting requests.

A new process is ready, and discovered by the others, before the old one drains. Calls of the old
one then end or fail over. Replies of a gateway cannot fail over: the order sets the time that they
have to end, while its successor accepts from the same socket.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace

from motet_cli.placement.jobs import moved
from motet_cli.placement.placement import ENGINES
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.orders import Report, Restart, Scale
from motet_cli.supervision.stack import FIXED, GATEWAY_DRAIN
from motet_cli.supervision.stack_bus import bus_config
from motet_cli.supervision.supervisor import Slot, Supervisor
from motet_shared.errors import ConfigError, Unavailable
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import HEARTBEAT_EVERY, Directory

_FAILOVER_AFTER = 5.0  # seconds that calls of a service have to end before they fail over
_START_TIMEOUT = 300.0  # seconds; large models load slowly


class Rolling:
    """Carry out orders for the processes of one supervisor."""

    def __init__(
        self,
        supervisor: Supervisor,
        connection: NatsAccess,
        report: Report,
        gpus: Sequence[str] = (),
    ):
        """Configure the supervisor to control.

        report: receives progress messages, in addition to the sender of each order. gpus: UUIDs of
        the GPUs that processes may be placed on.
        """
        self._supervisor, self._connection, self._report = supervisor, connection, report
        self._gpus = gpus

    async def carry_out(self, order: Restart | Scale, report: Report) -> None:
        """Carry out an order.

        Raises ConfigError for unknown roles, Unavailable if a new process does not become ready.
        """

        def report_both(text: str) -> None:
            self._report(text)
            report(text)

        self._check(order.roles if isinstance(order, Restart) else list(order.counts))
        async with self._directory() as directory:
            if isinstance(order, Restart):
                await self._restart(order, directory, report_both)
            else:
                for role, count in order.counts.items():
                    await self._scale(role, count, order.drain, directory, report_both)

    async def update(
        self,
        changed: Sequence[tuple[Slot, ChildSpec]],
        ended: Sequence[Slot],
        started: Sequence[Slot],
    ) -> None:
        """Replace processes by those of new specs; then end others, once `started` are ready.

        A process goes on if its successor does not become ready.
        """
        async with self._directory() as directory:
            for slot, spec in sorted(changed, key=lambda one: -one[0].spec.stage):
                if not self._goes_on(slot):
                    continue
                try:
                    await self._replace(slot, GATEWAY_DRAIN, directory, self._report, spec)
                except Unavailable as error:
                    self._report(error.message)
            for slot in started if ended else ():
                with contextlib.suppress(Unavailable):
                    await self._ready(slot, directory, has_old=False)
            for slot in ended:
                self._report(f"{slot.spec.name}: draining; it is not part of the stack any more")
                await self._end(slot, GATEWAY_DRAIN, self._report)

    @contextlib.asynccontextmanager
    async def _directory(self) -> AsyncIterator[Directory]:
        """Yield the directory of a connection to the bus."""
        config = bus_config(self._connection)
        bus = await Bus.connect(config.instance_id("operator"), config)
        try:
            yield bus.directory
        finally:
            await bus.close()

    def _check(self, roles: list[str]) -> None:
        specs = [slot.spec for slot in self._supervisor.slots]
        stages = {stage for spec in specs if (stage := _omni_stage(spec))}
        here = sorted({spec.role for spec in specs} - set(FIXED) | stages)
        for role in roles:
            if role not in here:
                raise ConfigError(
                    f"ROLE: {role!r} is not in this stack; choose one of {', '.join(here)}",
                    param="ROLE",
                )

    def _goes_on(self, slot: Slot) -> bool:
        """Return False for a process of a model on demand that was unloaded meanwhile, or leaves."""
        return slot in self._supervisor.slots and slot.state != "leaving"

    # ------------------------------------------------------------------------------------------------------- restart
    async def _restart(self, order: Restart, directory: Directory, report: Report) -> None:
        slots = [slot for slot in self._supervisor.slots if slot.spec.role not in FIXED]
        wanted = [
            slot
            for slot in slots
            if not order.roles or any(_is_of(slot.spec, role) for role in order.roles)
        ]
        # The gateway comes last: until then the old one routes to the new services.
        for slot in sorted(wanted, key=lambda slot: -slot.spec.stage):
            if not self._goes_on(slot):
                continue
            await self._replace(slot, order.drain, directory, report)

    async def _replace(
        self,
        slot: Slot,
        drain: float,
        directory: Directory,
        report: Report,
        spec: ChildSpec | None = None,
    ) -> None:
        """Replace a process by another one of `spec`; None: of the same."""
        spec = spec or slot.spec
        if slot.spec.gpus and slot.spec.role in ENGINES:
            await self._replace_on_gpu(slot, spec, drain, directory, report)
            return
        new = self._supervisor.add(spec, before=slot)
        seconds = await self._ready(new, directory)
        report(
            f"{slot.spec.name}: a new process is ready after {seconds:.1f} s; draining the old one"
        )
        await self._end(slot, drain, report)

    async def _replace_on_gpu(
        self, slot: Slot, spec: ChildSpec, drain: float, directory: Directory, report: Report
    ) -> None:
        """Replace an engine whose GPU does not hold it twice: the old process ends first."""
        report(f"{slot.spec.name}: draining; its GPU holds one process at a time")
        new = self._supervisor.add(spec, before=slot, gate=(gone := asyncio.Event()))
        await self._end(slot, drain, report)
        gone.set()
        seconds = await self._ready(new, directory, has_old=False)
        report(f"{slot.spec.name}: a new process is ready after {seconds:.1f} s")

    async def _ready(self, slot: Slot, directory: Directory, *, has_old: bool = True) -> float:
        """Wait until a new process is ready and discovered; return the seconds.

        has_old: the one that it replaces still runs. If the new one fails, Unavailable is raised, and
        it is removed if there is an old one; else it is started again and again.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while not is_ready(slot, directory):
                if slot not in self._supervisor.slots:
                    raise Unavailable(f"{slot.spec.name}: its model was unloaded meanwhile")
                if slot.state == "failing" or loop.time() - began > _START_TIMEOUT:
                    kept = "the old one still runs" if has_old else "it is started again"
                    raise Unavailable(
                        f"{slot.spec.name}: the new process is not ready ({slot.last_exit or 'timeout'});"
                        f" {kept}; see the log"
                    )
                await asyncio.sleep(0.05)
            await asyncio.sleep(HEARTBEAT_EVERY)
        except BaseException:
            if has_old:
                await self._supervisor.remove(slot, 0.0)
            raise
        return loop.time() - began

    async def _end(self, slot: Slot, drain: float, report: Report) -> None:
        if not await self._supervisor.remove(
            slot, drain if slot.spec.role == "gateway" else _FAILOVER_AFTER
        ):
            report(f"{slot.spec.name}: the old process did not end in time and was killed")

    # --------------------------------------------------------------------------------------------------------- scale
    async def _scale(
        self, role: str, count: int, drain: float, directory: Directory, report: Report
    ) -> None:
        if count < 1:
            raise ConfigError(f"ROLE=N: {role}={count} is too few; give at least 1", param="ROLE=N")
        of_role = [slot for slot in self._supervisor.slots if _is_of(slot.spec, role)]
        for model in dict.fromkeys(slot.spec.model for slot in of_role):
            slots = [slot for slot in of_role if slot.spec.model == model]
            for _ in range(len(slots), count):
                stage = _omni_stage(slots[-1].spec) or role
                spec = replace(slots[-1].spec, name=self._free_name(stage))
                taken = [slot.spec for slot in self._supervisor.slots]
                new = self._supervisor.add(moved(spec, taken, self._gpus))
                seconds = await self._ready(new, directory)
                report(f"{new.spec.name}: ready after {seconds:.1f} s")
            for slot in sorted(slots, key=_fails)[count:]:
                report(f"{slot.spec.name}: draining")
                await self._end(slot, drain, report)

    def _free_name(self, role: str) -> str:
        taken = {slot.spec.name for slot in self._supervisor.slots}
        return next(
            name for number in itertools.count(2) if (name := f"{role}-{number}") not in taken
        )


def _is_of(spec: ChildSpec, role: str) -> bool:
    """Return True for a process of a role, or of a stage of an omni model that is named alone."""
    return role in (spec.role, _omni_stage(spec))


def _omni_stage(spec: ChildSpec) -> str | None:
    """Return the stage of an omni model whose role does not tell it, "talker" or "code2wav"."""
    stage = spec.name.partition("-")[0]
    return stage if stage in ("talker", "code2wav") else None


def _fails(slot: Slot) -> bool:
    """Return True for a process that does not run, or keeps ending."""
    return slot.state != "running" or slot.backoff.crash_loop(time.monotonic())


def is_ready(slot: Slot, directory: Directory) -> bool:
    """Return True if the process of a slot takes work, as the directory sees it."""
    instance = slot.child.instance if slot.child is not None and slot.state == "running" else None
    return any(beat.instance == instance for beat in directory.ready(slot.spec.role))
