"""Run the services of a machine that has joined a stack, until it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Sequence
from pathlib import Path

from motet_cli.supervision import orders
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.connection import NatsAccess
from motet_cli.supervision.logs import Log
from motet_cli.supervision.nursery import Nursery
from motet_cli.supervision.rolling import is_ready
from motet_cli.supervision.stack import nursery_environment
from motet_cli.supervision.stack_bus import stack_bus
from motet_cli.supervision.state_file import StateFile
from motet_cli.supervision.supervisor import EXIT_CONFIG, Slot, Supervisor
from motet_shared.errors import ConfigError, MotetError, Unavailable
from motet_shared.wire.discovery import Directory

_LONGEST_START = 3600.0  # seconds; a large model is downloaded and packed first


class JoinedHost:
    """Supervise processes whose NATS server and gateway are on another host.

    has_left: True once `motet leave` has ended them.
    """

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        access: NatsAccess,
        log: Log,
        *,
        socket: Path,
        state_file: Path | None = None,
        nursery: bool = True,
    ) -> None:
        """Configure the run without starting a process.

        access: NATS of the stack. socket: where `motet leave` reaches this process.
        """
        self._specs, self._access, self._log = specs, access, log
        self._socket = socket
        self._state_file = None if state_file is None else StateFile(state_file, log.note)
        forks = Nursery(nursery_environment(), log.note, log.printed_by("nursery", "nursery"))
        self._nursery = forks if nursery else None
        self._supervisor = Supervisor(log, on_change=self._on_change, nursery=self._nursery)
        self._stop, self._refused = asyncio.Event(), asyncio.Event()
        self.has_left = False

    async def run(self) -> int:
        """Run until `motet leave`, Ctrl-C or SIGTERM.

        Exit code: 0 all processes ended, 1 some were killed, 78 the settings of all are wrong.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            loop.add_signal_handler(number, self._stop.set)
        self._log.reserve([spec.name for spec in self._specs])
        clean = False
        async with orders.serving_orders(self._socket, self._carry_out):
            self._supervisor.start(self._specs)
            reporting = asyncio.create_task(self._report_ready(), name="report ready")
            ends = [asyncio.create_task(one.wait()) for one in (self._stop, self._refused)]
            try:
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for task in (*ends, reporting):
                    task.cancel()
                await asyncio.gather(*ends, reporting, return_exceptions=True)
                clean = await self._supervisor.stop()
                if self._nursery is not None:
                    await self._nursery.close()
        if self._refused.is_set():
            return EXIT_CONFIG
        return 0 if clean else 1

    async def _carry_out(self, order: orders.Order, report: orders.Report) -> None:
        if not isinstance(order, orders.Leave):
            raise ConfigError(
                "--url: names a machine that has joined a stack; `motet leave` is the only order"
                " that it takes",
                param="--url",
            )
        self._log.note(f"leaving: running work has {order.drain:g} s to end")
        slots = list(self._supervisor.slots)
        ended = await asyncio.gather(*(self._end(slot, order.drain, report) for slot in slots))
        self._log.note("has left the stack")
        self.has_left = True
        self._stop.set()
        if not all(ended):
            raise Unavailable("drain: some processes did not end in time and were killed")

    async def _end(self, slot: Slot, drain: float, report: orders.Report) -> bool:
        report(f"{slot.spec.name}: draining")
        clean = await self._supervisor.remove(slot, drain)
        report(f"{slot.spec.name}: {'has ended' if clean else 'was killed'}")
        return clean

    async def _report_ready(self) -> None:
        """Log once that all processes take work, as the rest of the stack sees it."""
        began = asyncio.get_running_loop().time()
        try:
            async with stack_bus(self._access) as bus:
                await bus.directory.wait_for(self._all_ready, _LONGEST_START)
        except (MotetError, TimeoutError) as error:
            self._log.note(f"not all services are ready: {error}", "warning")
            return
        seconds = asyncio.get_running_loop().time() - began
        names = ", ".join(spec.name for spec in self._specs)
        self._log.note(f"ready after {seconds:.1f} s: {names} serve the stack")

    def _all_ready(self, directory: Directory) -> bool:
        return all(is_ready(slot, directory) for slot in self._supervisor.slots)

    def _on_change(self) -> None:
        slots = self._supervisor.slots
        if slots and all(slot.refused for slot in slots):
            self._log.note("nothing can be served: correct the settings above", "error")
            self._refused.set()
        if self._state_file is not None:
            self._state_file.write({"pid": os.getpid(), "children": self._supervisor.describe()})
