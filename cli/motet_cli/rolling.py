"""Replaces and counts the processes of a running stack without anybody noticing.

The new process is ready, and known to all, before the old one is told to take no more; what runs there then ends, or
goes on elsewhere. The gateway's replies cannot go elsewhere: it has as long as the order says. Its successor accepts
from the same socket.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from motet_cli.connection import Connection
from motet_cli.orders import Order, Restart, Tell
from motet_cli.supervisor import Slot, Supervisor
from motet_shared.bus import Bus
from motet_shared.config import ProcessConfig
from motet_shared.discovery import HEARTBEAT_EVERY, Directory
from motet_shared.errors import ConfigError, Unavailable

_MOVE_AFTER = 5.0  # seconds that calls of a service have to end before they go on elsewhere
_START_WITHIN = 300.0  # seconds: a large model takes its time
_FIXED = ("nats",)  # all messages pass through it


class Rolling:
    """Of one supervisor."""

    def __init__(self, supervisor: Supervisor, connection: Connection, tell: Tell):
        """`tell` hears of it besides whoever gave the order."""
        self._supervisor, self._connection, self._tell = supervisor, connection, tell

    async def carry_out(self, order: Order, tell: Tell) -> None:
        """ConfigError for roles that are not there; Unavailable if a new process does not become ready."""

        def both(text: str) -> None:
            self._tell(text)
            tell(text)

        config = ProcessConfig(
            nats_url=self._connection.nats_url, nats_password=self._connection.nats_password, metrics_port=-1
        )
        self._check(order.roles if isinstance(order, Restart) else list(order.counts))
        bus = await Bus.connect(config.instance_id("operator"), config)
        try:
            if isinstance(order, Restart):
                await self._restart(order, bus.directory, both)
            else:
                for role, count in order.counts.items():
                    await self._scale(role, count, order.drain, bus.directory, both)
        finally:
            await bus.close()

    def _check(self, roles: list[str]) -> None:
        here = sorted({slot.spec.role for slot in self._supervisor.slots} - set(_FIXED))
        for role in roles:
            if role not in here:
                raise ConfigError(f"ROLE: {role!r} is none of this stack's; there are {', '.join(here)}")

    # ------------------------------------------------------------------------------------------------------- restart
    async def _restart(self, order: Restart, directory: Directory, tell: Tell) -> None:
        slots = [slot for slot in self._supervisor.slots if slot.spec.role not in _FIXED]
        wanted = [slot for slot in slots if not order.roles or slot.spec.role in order.roles]
        # The door comes last: until then it is the old one that knows how to find the new ones.
        for slot in sorted(wanted, key=lambda slot: -slot.spec.stage):
            await self._replace(slot, order.drain, directory, tell)

    async def _replace(self, slot: Slot, drain: float, directory: Directory, tell: Tell) -> None:
        new = self._supervisor.add(slot.spec, before=slot)
        seconds = await self._ready(new, directory)
        tell(f"{slot.spec.name}: a new one is ready after {seconds:.1f} s; the old one ends")
        await self._end(slot, drain, tell)

    async def _ready(self, slot: Slot, directory: Directory) -> float:
        """Wait until a new process is ready and everybody knows it; how long that took. If it fails, it is gone."""
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            while not _is_ready(slot, directory):
                if slot.state == "failing" or loop.time() - began > _START_WITHIN:
                    raise Unavailable(
                        f"{slot.spec.name}: the new process is not ready ({slot.last_exit or 'it takes too long'});"
                        " nothing was changed, the log has its words"
                    )
                await asyncio.sleep(0.05)
            await asyncio.sleep(HEARTBEAT_EVERY)
        except BaseException:
            await self._supervisor.remove(slot, 0.0)
            raise
        return loop.time() - began

    async def _end(self, slot: Slot, drain: float, tell: Tell) -> None:
        if not await self._supervisor.remove(slot, drain if slot.spec.role == "gateway" else _MOVE_AFTER):
            tell(f"{slot.spec.name}: the old one did not end by itself and was killed")

    # --------------------------------------------------------------------------------------------------------- scale
    async def _scale(self, role: str, count: int, drain: float, directory: Directory, tell: Tell) -> None:
        if count < 1:
            raise ConfigError(f"{role}: {count} is too few; keep at least 1")
        of_role = [slot for slot in self._supervisor.slots if slot.spec.role == role]
        for model in dict.fromkeys(slot.spec.model for slot in of_role):
            slots = [slot for slot in of_role if slot.spec.model == model]
            for _ in range(len(slots), count):
                new = self._supervisor.add(replace(slots[-1].spec, name=self._free_name(role)))
                seconds = await self._ready(new, directory)
                tell(f"{new.spec.name}: ready after {seconds:.1f} s")
            for slot in slots[count:]:
                tell(f"{slot.spec.name}: ends")
                await self._end(slot, drain, tell)

    def _free_name(self, role: str) -> str:
        taken = {slot.spec.name for slot in self._supervisor.slots}
        return next(name for number in itertools.count(2) if (name := f"{role}-{number}") not in taken)


def _is_ready(slot: Slot, directory: Directory) -> bool:
    instance = slot.child.instance if slot.child is not None and slot.state == "running" else None
    return any(beat.instance == instance for beat in directory.ready(slot.spec.role))
