"""Connect a run of `motet up --survive` with what an earlier run has left."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from motet_cli.placement.gpus import GpuListing
from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.stack import FIXED, Stack
from motet_cli.supervision.supervisor import Slot, Supervisor
from motet_cli.survival import watchdog
from motet_cli.survival.identity import identify
from motet_cli.survival.leftovers import end_stack, kill_strays, take_over
from motet_cli.survival.record import (
    MARK,
    Base,
    Measured,
    ProcessRecord,
    Recorder,
    StackFolder,
    StackRecord,
)
from motet_cli.survival.takeover import decide
from motet_shared.errors import ConfigError, Unavailable


@dataclass
class Adopted:
    """Hold the slots of processes that were taken over.

    start: specs that have no process. changed: slots to replace, with their new specs. ended: slots
    to end. leaving: those that the earlier supervisor has told to end.
    """

    start: list[ChildSpec]
    kept: list[Slot] = field(default_factory=list)
    changed: list[tuple[Slot, ChildSpec]] = field(default_factory=list)
    ended: list[Slot] = field(default_factory=list)
    leaving: list[Slot] = field(default_factory=list)


class Survival:
    """Keep one run's record, and take over the processes of the run before.

    left: record of processes without a supervisor; None: there are none.
    """

    def __init__(self, folder: StackFolder, orphan_seconds: float) -> None:
        self.folder = folder
        self.left = folder.read()
        self._orphan_seconds = orphan_seconds
        self._recorder: Recorder | None = None

    async def end_left(self, log: Log) -> None:
        """End what an earlier run has left."""
        if self.left is not None:
            await end_stack(self.folder, self.left, log)
            self.left = None

    def fetch_listener(self, base: Base) -> socket.socket | None:
        """Return the listening socket of the earlier run; None if its processes cannot go on."""
        if self.left is None or self.left.stopping or self.left.base != base:
            return None
        return watchdog.fetch_listener(self.folder)

    def begin(self, stack: Stack, base: Base, log: Log) -> None:
        """Write down that this process is the supervisor. Raises ConfigError."""
        me = identify(os.getpid())
        if me is None or stack.memory is None:
            raise RuntimeError("--survive: the stack is not complete yet")
        gpus = None if stack.placement is None else GpuListing(stack.placement.gpus)
        record = StackRecord(
            supervisor=me,
            base=base,
            nats_url=stack.nats_url,
            credentials=None if stack.credentials is None else str(stack.credentials),
            measured=Measured(memory=stack.memory.free, gpus=gpus),
            orphan_seconds=self._orphan_seconds,
            processes=() if self.left is None else self.left.processes,
        )
        try:
            self.folder.write(record)
        except OSError as error:
            raise ConfigError(
                f"--survive: cannot write into {self.folder.path}: {error}; set XDG_RUNTIME_DIR to a"
                " writable folder",
                param="--survive",
            ) from None
        self._recorder = Recorder(self.folder, record, log.note)

    def record(self, slots: Iterable[Slot], *, stopping: bool) -> None:
        """Write the processes that run now."""
        if self._recorder is not None:
            self._recorder.write(slots, stopping=stopping)

    def loaded(self, models: Iterable[Sequence[ChildSpec]]) -> list[ChildSpec]:
        """Return the processes of the models on demand that the earlier run had loaded."""
        found = () if self.left is None else self.left.processes
        # Those of a model that was being unloaded end, and the model is loaded when it is wanted.
        names = {one.spec.name for one in found if not one.leaving}
        return [
            spec for specs in models if any(one.name in names for one in specs) for spec in specs
        ]

    async def adopt(self, supervisor: Supervisor, wanted: Sequence[ChildSpec], log: Log) -> Adopted:
        """Hand the processes of the earlier run over to `supervisor`, where `wanted` are to run."""
        found = () if self.left is None else self.left.processes
        taken = decide(found, wanted, FIXED)
        keep = [(spec, await _open(one, spec, log)) for one, spec in taken.keep]
        change = [(spec, await _open(one, one.spec, log)) for one, spec in taken.replace]
        end = [(one.leaving, await _open(one, one.spec, log)) for one in taken.end]
        if self.left is not None:
            kill_strays(self.folder, [one.identity for one in found])
        # From here on without awaiting: the record always has all processes.
        adopted = Adopted(start=taken.start)
        for spec, child in keep:
            if child is None:
                adopted.start.append(spec)
            elif child.has_output or spec.role in FIXED:
                adopted.kept.append(supervisor.adopt(child))
            else:  # it would wait for a reader one day
                adopted.changed.append((supervisor.adopt(child), spec))
        for spec, child in change:
            if child is None:
                adopted.start.append(spec)
            else:
                adopted.changed.append((supervisor.adopt(child), spec))
        for leaving, child in end:
            if child is not None:
                slot = supervisor.adopt(child, leaving=leaving)
                (adopted.leaving if leaving else adopted.ended).append(slot)
        return adopted


def check_survival(port: int, orphan_seconds: float) -> None:
    """Raise ConfigError if a stack with these settings cannot be taken over."""
    if not port:
        raise ConfigError(
            "--survive: needs a port by which the next `motet up` finds the services; give --port",
            param="--survive",
        )
    if orphan_seconds < 0:
        raise ConfigError(
            f"--orphan-timeout: {orphan_seconds:g} is negative; give seconds",
            param="--orphan-timeout",
        )


@contextlib.contextmanager
def surviving(port: int, orphan_seconds: float) -> Iterator[Survival]:
    """Control the stack on an HTTP port for the context. Raises ConfigError or Unavailable."""
    check_survival(port, orphan_seconds)
    folder = StackFolder(port)
    with folder.claimed() as alone:
        if not alone:
            raise Unavailable(
                f"another process controls the stack on port {port}, or is ending it; end it with"
                " `motet down`, or wait"
            )
        os.environ[MARK] = str(folder.path)
        yield Survival(folder, orphan_seconds)


async def _open(one: ProcessRecord, spec: ChildSpec, log: Log) -> Child | None:
    return await take_over(one, log.printed_by(spec.name, spec.role), spec)
