"""Take over processes of a record one by one, and end a stack that has no supervisor."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterable

from motet_cli.supervision import connection
from motet_cli.supervision.child import Child, ChildSpec
from motet_cli.supervision.logs import Log
from motet_cli.supervision.supervisor import Supervisor
from motet_cli.survival.identity import Identity, identify, marked, open_pidfd, parent_of
from motet_cli.survival.output import open_output
from motet_cli.survival.record import MARK, ProcessRecord, StackFolder, StackRecord


async def take_over(
    found: ProcessRecord, on_line: Callable[[str], None], spec: ChildSpec | None = None
) -> Child | None:
    """Return the process of a record as a child with `spec` (None: its own); None if it has ended.

    Its output is lost if it cannot be opened.
    """
    pidfd = open_pidfd(found.identity)
    if pidfd is None:
        return None
    pid = found.identity.pid
    output = None
    with contextlib.suppress(OSError):
        output = open_output(pid)
    return await Child.adopt(
        spec or found.spec, on_line, pid=pid, instance=found.instance, pidfd=pidfd, output=output
    )


def kill_strays(folder: StackFolder, known: Iterable[Identity]) -> int:
    """Kill processes of the stack that no record has, and return how many.

    They were started in the milliseconds before a supervisor was killed. The processes that a known
    one has started are its own.
    """
    kept = {one.pid for one in known} | {os.getpid()}
    killed = 0
    for found in marked(MARK, str(folder.path)):
        if not kept.isdisjoint(_line_of(found.pid)):
            continue
        if (pidfd := open_pidfd(found)) is not None:
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            killed += 1
    return killed


def _line_of(pid: int) -> list[int]:
    """Return a process and its ancestors."""
    found = []
    while pid > 1:
        found.append(pid)
        pid = parent_of(pid)
    return found


async def end_stack(folder: StackFolder, record: StackRecord, log: Log) -> bool:
    """End all processes of a record but this one, in order, and remove what they had.

    Replies in flight have as long to end as at the end of a supervisor. Returns True if no process
    had to be killed. The caller has the claim of the folder.
    """
    supervisor = Supervisor(log)
    for found in record.processes:
        if found.identity == identify(os.getpid()):
            continue
        child = await take_over(found, log.printed_by(found.spec.name, found.spec.role))
        if child is not None:
            supervisor.adopt(child)
    clean = await supervisor.stop()
    kill_strays(folder, [])
    connection.forget(record.base.port)
    folder.clear()
    return clean
