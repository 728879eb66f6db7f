"""Replace and scale the processes of a running stack without interrupting requests.

The new process is ready, and discovered by the others, before the old one drains; what runs there
then ends, or fails over. Replies of a gateway cannot fail over: they have as long as the order
says. Its successor accepts from the same socket.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

from motet_cli.supervision.connection import Connection
from motet_cli.supervision.orders import Order, Restart, Tell
from motet_cli.supervision.stack_bus import bus_config
from motet_cli.supervision.supervisor import Slot, Supervisor
from motet_shared.errors import ConfigError, Unavailable
from motet_shared.wire.bus import Bus
from motet_shared.wire.discovery import HEARTBEAT_EVERY, Directory

_MOVE_AFTER = 5.0  # seconds that calls of a service have to end before they fail over
_START_WITHIN = 300.0  # seconds; large models load slowly
_FIXED = ("nats",)  # carries all messages


class Rolling:
    """Carry out orders for the processes of one supervisor."""

    def __init__(self, supervisor: Supervisor, connection: Connection, tell: Tell):
        """Set up; `tell` receives progress messages besides the sender of each order."""
        self._supervisor, self._connection, self._tell = supervisor, connection, tell

    async def carry_out(self, order: Order, tell: Tell) -> None:
        """Carry out an order.

        Raises ConfigError for unknown roles, Unavailable if a new process does not become ready.
        """

        def both(text: str) -> None:
            self._tell(text)
            tell(text)

        config = bus_config(self._connection)
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
                raise ConfigError(
                    f"ROLE: {role!r} is none of this stack's; there are {', '.join(here)}"
                )

    # ------------------------------------------------------------------------------------------------------- restart
    async def _restart(self, order: Restart, directory: Directory, tell: Tell) -> None:
        slots = [slot for slot in self._supervisor.slots if slot.spec.role not in _FIXED]
        wanted = [slot for slot in slots if not order.roles or slot.spec.role in order.roles]
        # The gateway comes last: until then the old one routes to the new services.
        for slot in sorted(wanted, key=lambda slot: -slot.spec.stage):
            await self._replace(slot, order.drain, directory, tell)

    async def _replace(self, slot: Slot, drain: float, directory: Directory, tell: Tell) -> None:
        new = self._supervisor.add(slot.spec, before=slot)
        seconds = await self._ready(new, directory)
        tell(f"{slot.spec.name}: a new one is ready after {seconds:.1f} s; the old one ends")
        await self._end(slot, drain, tell)

    async def _ready(self, slot: Slot, directory: Directory) -> float:
        """Wait until a new process is ready and discovered; return the seconds.

        If it fails, it is removed and Unavailable is raised.
        """
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
        if not await self._supervisor.remove(
            slot, drain if slot.spec.role == "gateway" else _MOVE_AFTER
        ):
            tell(f"{slot.spec.name}: the old one did not end by itself and was killed")

    # --------------------------------------------------------------------------------------------------------- scale
    async def _scale(
        self, role: str, count: int, drain: float, directory: Directory, tell: Tell
    ) -> None:
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
        return next(
            name for number in itertools.count(2) if (name := f"{role}-{number}") not in taken
        )


def _is_ready(slot: Slot, directory: Directory) -> bool:
    instance = slot.child.instance if slot.child is not None and slot.state == "running" else None
    return any(beat.instance == instance for beat in directory.ready(slot.spec.role))
