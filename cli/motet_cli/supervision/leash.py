"""End child processes with their parent, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def leash(parent: int) -> None:
    """Have the kernel kill this new process when `parent` ends; exit if it has ended already."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the signal was set
        os._exit(1)


def adopt(orphans: bool) -> None:
    """Set whether this process, instead of init, adopts its children's orphans (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)
