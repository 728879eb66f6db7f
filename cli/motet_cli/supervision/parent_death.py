"""Bind child processes to their parent through prctl(2), so that none outlives it."""

from __future__ import annotations

import ctypes
import os
import signal

_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(parent: int) -> None:
    """Request SIGKILL for this new process at the end of `parent`; exit if it has ended."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:  # the parent died before the signal was set
        os._exit(1)


def set_subreaper(enabled: bool) -> None:
    """Make this process adopt orphaned descendants instead of init, or stop doing so."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, int(enabled), 0, 0, 0)
