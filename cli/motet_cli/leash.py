"""The end of a parent is the end of its children, however it ends."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def leash(parent: int) -> None:
    """To be called in a new process: the kernel kills it when `parent` ends. One whose parent has ended exits."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the signal was set
        os._exit(1)


def adopt(orphans: bool) -> None:
    """Whether this process becomes the parent of what its children leave behind, instead of init (prctl(2))."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(orphans), 0, 0, 0)
