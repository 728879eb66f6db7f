"""Identify processes beyond the life of the process that started them.

A pid may be used again. A pid with its start time names one process of a boot, and a pidfd refers to
that process only, also after its end.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """Name one process of this boot.

    started: clock ticks from the boot to the start of the process, as in /proc/PID/stat.
    """

    pid: int
    started: int


def identify(pid: int) -> Identity | None:
    """Return the identity of a process; None if it has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in "ZX" else Identity(pid, int(fields[19]))


def parent_of(pid: int) -> int:
    """Return the pid of a process's parent; 0 if the process has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return 0


def open_pidfd(identity: Identity) -> int | None:
    """Return a pidfd of exactly this process; None if it has ended. The caller closes it."""
    try:
        pidfd = os.pidfd_open(identity.pid)
    except OSError:
        return None
    # The descriptor was opened first: what /proc says now is about the process that it refers to.
    if identify(identity.pid) != identity:
        os.close(pidfd)
        return None
    return pidfd


def place() -> str:
    """Return where pids have a meaning: the id of this boot, and the namespace of pids."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {os.readlink('/proc/self/ns/pid')}"


def marked(variable: str, value: str) -> list[Identity]:
    """Return the processes of this user that were started with a variable of this value."""
    wanted = f"{variable}={value}".encode()
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal():
            continue
        try:
            variables = (folder / "environ").read_bytes().split(b"\0")
        except OSError:  # of another user, or it has ended
            continue
        if wanted in variables and (identity := identify(int(folder.name))) is not None:
            found.append(identity)
    return found
