"""Wait until other processes have ended, and with them the memory that they hold is free."""

from __future__ import annotations

import os
import select
from collections.abc import Iterable
from contextlib import ExitStack
from pathlib import Path

_STARTED = 19  # field of /proc/PID/stat behind the name: the start, in ticks since the boot


def identity_of(pid: int) -> str | None:
    """Return the id of a process and its start, `PID:TICKS`; None if there is none.

    The number alone may be that of another process later.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return f"{pid}:{fields[_STARTED]}"
    except (OSError, IndexError):
        return None


def wait_for_exits(identities: Iterable[str]) -> None:
    """Return when all processes have ended of which these are the values of `identity_of`.

    Raises ValueError for another text.
    """
    with ExitStack() as opened:
        waiting = select.poll()
        running = 0
        for identity in identities:
            pid = int(identity.partition(":")[0])
            try:
                descriptor = os.pidfd_open(pid)
            except ProcessLookupError:
                continue
            opened.callback(os.close, descriptor)
            if identity_of(pid) == identity:
                waiting.register(descriptor, select.POLLIN)
                running += 1
        while running:
            for descriptor, _ in waiting.poll():
                waiting.unregister(descriptor)
                running -= 1
