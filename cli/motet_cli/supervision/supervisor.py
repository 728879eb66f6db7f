"""Keep a set of processes running: start, restart with back-off, stop in order.

`stack` defines the processes; `child` runs a single one.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, Literal

from motet_cli.supervision.backoff import Backoff, BackoffPolicy
from motet_cli.supervision.child import Child, ChildSpec, Spawn
from motet_cli.supervision.logs import Log
from motet_cli.supervision.nursery import NotForked, Nursery

# Of a process that returns: no crash loop, since clients wait for it, and a request that kills
# gateways is given up by the descriptor store.
AT_ONCE = BackoffPolicy(first=0.02, cap=1.0, burst=1000)
SlotState = Literal["waiting", "running", "failing", "leaving", "stopped"]
_SHOWN_TAIL = 8  # lines
EXIT_CONFIG = 78  # EX_CONFIG of sysexits.h: by which services end that have a wrong setting


class Slot:
    """Keep the state of one process over all its restarts.

    refused: it ended because of a wrong setting, and is not started again.
    """

    def __init__(self, spec: ChildSpec, policy: BackoffPolicy) -> None:
        self.spec = spec
        self.state: SlotState = "waiting"
        self.child: Child | None = None
        self.restarts = 0
        self.refused = False
        self.last_exit = ""
        self.backoff = Backoff(policy)

    def describe(self) -> dict[str, Any]:
        child = self.child if self.state in ("running", "leaving") else None
        return {
            "name": self.spec.name,
            "role": self.spec.role,
            "model": self.spec.model,
            "state": self.state,
            "pid": child.pid if child else None,
            "instance": child.instance if child else None,
            "restarts": self.restarts,
            "last_exit": self.last_exit,
        }


class Supervisor:
    """Run processes until `stop`.

    A process in a crash loop is reported with its last lines; the others continue. One that ends by
    EX_CONFIG is not started again: its setting would be as wrong as before.
    """

    def __init__(
        self,
        log: Log,
        *,
        policy: BackoffPolicy | None = None,
        on_change: Callable[[], None] = lambda: None,
        nursery: Nursery | None = None,
        spawn: Spawn | None = None,
    ) -> None:
        """Configure the supervisor without starting a process.

        on_change: called after every start, stop and exit.
        nursery: forks the specs that may be forked; None: each is executed as a new program.
        spawn: executes a new program; None: one that ends with this process.
        """
        self.slots: list[Slot] = []
        self._log = log
        self._policy = policy or BackoffPolicy()
        self._on_change = on_change
        self._nursery, self._spawn = nursery, spawn
        self._tasks: dict[Slot, asyncio.Task[None]] = {}
        self._stopping = False

    def start(self, specs: Iterable[ChildSpec]) -> None:
        """Add processes and start all of them at once."""
        for spec in specs:
            self.add(spec)

    async def prepare(self, specs: Iterable[ChildSpec]) -> None:
        """Fork processes in advance for the next starts of these specs, where that is possible."""
        if self._nursery is None:
            return
        for module in sorted({spec.argv[2] for spec in specs if spec.forks}):
            with suppress(NotForked, OSError):  # told when a process is to be started
                await self._nursery.prepare(module)

    @property
    def forks_aside(self) -> bool:
        """Return True if `fork_aside` may succeed."""
        return self._nursery is not None and not self._nursery.outlived

    async def fork_aside(self, spec: ChildSpec) -> Child:
        """Fork a process that is none of the slots until it is passed to `admit`.

        Raises NotForked or OSError.
        """
        if self._nursery is None:
            raise NotForked("there is no nursery")
        on_line = self._log.printed_by(spec.name, spec.role)
        return await Child.start(spec, on_line, self._nursery.fork)

    def add(
        self, spec: ChildSpec, before: Slot | None = None, gate: asyncio.Event | None = None
    ) -> Slot:
        """Add a process and start it, once `gate` is set if one is given.

        before: the slot that it is listed before; None: listed last.
        """
        slot = self._slot(spec)
        self.slots.insert(len(self.slots) if before is None else self.slots.index(before), slot)
        self._tasks[slot] = asyncio.create_task(
            self._keep_running(slot, gate), name=f"keep {spec.name}"
        )
        return slot

    def adopt(self, child: Child, *, leaving: bool = False) -> Slot:
        """Add a process that runs already; it is started again by its spec when it ends.

        leaving: it has been told to end, and is not started again.
        """
        slot = self._slot(child.spec)
        slot.child, slot.state = child, "leaving" if leaving else "running"
        self.slots.append(slot)
        self._tasks[slot] = asyncio.create_task(
            self._keep_running(slot, None, adopted=child), name=f"keep {child.spec.name}"
        )
        return slot

    def admit(self, child: Child) -> Slot:
        """Add a process of `fork_aside`, as `adopt` does, and tell of the change."""
        slot = self.adopt(child)
        self.changed()
        return slot

    async def remove(self, slot: Slot, drain: float | None = None) -> bool:
        """Stop a process without restarting it; its work has `drain` seconds to end.

        Returns True if it did not have to be killed, or was removed before.
        """
        if slot not in self._tasks:
            return True
        clean = await self._stop_slot(slot, drain)
        if self._tasks.pop(slot, None) is not None:  # else another call has waited for it, too
            self.slots.remove(slot)
            self.changed()
        return clean

    async def stop(self) -> bool:
        """Stop all processes, stage by stage; return True if none had to be killed."""
        self._stopping = True
        clean = True
        stages = sorted(self.slots, key=lambda slot: slot.spec.stage)
        for _, group in itertools.groupby(stages, key=lambda slot: slot.spec.stage):
            results = await asyncio.gather(*(self._stop_slot(slot) for slot in group))
            clean = clean and all(results)
        return clean

    async def kill(self) -> None:
        """Kill all processes at once."""
        self._stopping = True
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*(slot.child.kill() for slot in self.slots if slot.child))

    def changed(self) -> None:
        """Call `on_change`; its error is logged, since it must not end the supervision."""
        try:
            self._on_change()
        except Exception:
            self._log.note(f"on_change has failed\n{traceback.format_exc()}", "error")

    def describe(self) -> list[dict[str, Any]]:
        return [slot.describe() for slot in self.slots]

    def _slot(self, spec: ChildSpec) -> Slot:
        return Slot(spec, AT_ONCE if spec.returns else self._policy)

    async def _stop_slot(self, slot: Slot, drain: float | None = None) -> bool:
        clean = True
        if slot.child is not None and slot.state in ("running", "leaving"):
            slot.state = "leaving"
            self.changed()  # the next supervisor must not take it for one that serves
            clean = await slot.child.stop(drain)
            if not clean:
                self._log.note(
                    f"{slot.spec.name} did not end within {slot.spec.grace:g} s: killed", "warning"
                )
        if (task := self._tasks.get(slot)) is not None:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        slot.state = "stopped"
        self.changed()
        return clean

    async def _keep_running(
        self, slot: Slot, gate: asyncio.Event | None, adopted: Child | None = None
    ) -> None:
        if gate is not None:
            await gate.wait()
        while not self._stopping:
            delay = await self._run_once(slot, adopted)
            adopted = None
            if self._stopping or slot.refused or slot.state == "leaving":
                return
            await asyncio.sleep(delay)
            slot.restarts += 1

    async def _run_once(self, slot: Slot, adopted: Child | None) -> float:
        """Run the process until it exits; return the seconds to wait before the next start.

        adopted: it runs already.
        """
        started = time.monotonic()
        try:
            slot.child = adopted or await self._started(slot)
        except OSError as error:
            slot.last_exit = f"cannot start: {error}"
        else:
            if adopted is None:
                slot.state = "running"
                self.changed()
            await slot.child.wait()
            slot.last_exit = slot.child.exit_description
            state: SlotState = slot.state  # may have changed meanwhile
            if state == "leaving":
                return 0.0
            slot.refused = slot.child.status == EXIT_CONFIG
        now = time.monotonic()
        delay = slot.backoff.exited(now, now - started)
        failing = slot.backoff.crash_loop(now)
        slot.state = "failing" if failing or slot.refused else "waiting"
        if not self._stopping:
            self._report_exit(slot, delay, failing)
        self.changed()
        return delay

    async def _started(self, slot: Slot) -> Child:
        """Start the process, forking it if possible. Raises OSError."""
        spec = slot.spec

        on_line = self._log.printed_by(spec.name, spec.role)
        if self._nursery is not None and (spec.forks or (spec.returns and slot.restarts)):
            try:
                return await Child.start(spec, on_line, self._nursery.fork)
            except NotForked as error:
                self._log.note(f"{spec.name} starts without the nursery: {error}", "warning")
        return await Child.start(spec, on_line, self._spawn)

    def _report_exit(self, slot: Slot, delay: float, failing: bool) -> None:
        again = f"next start in {delay:g} s"
        if slot.refused:
            again = "a setting is wrong, so it is not started again"
        elif not failing:
            self._log.note(f"{slot.spec.name} ended ({slot.last_exit}); {again}", "warning")
            return
        tail = list(slot.child.tail)[-_SHOWN_TAIL:] if slot.child else []
        last_lines = "; last lines:" + "".join(f"\n    {line}" for line in tail) if tail else ""
        what = "ended" if slot.refused else "keeps ending"
        self._log.note(f"{slot.spec.name} {what} ({slot.last_exit}); {again}{last_lines}", "error")
