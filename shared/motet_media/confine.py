"""Confine this process to what a decoder needs: restrict network, files, processes, memory, time.

Each protection is attempted, and the result reports which ones the system granted. Linux only,
unprivileged.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import os
import resource
import signal
from collections.abc import Callable, Iterator
from types import FrameType

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CLONE_NEWUSER, _CLONE_NEWNET, _CLONE_NEWIPC = 0x10000000, 0x40000000, 0x08000000
# System calls of landlock(7), the same on every architecture.
_CREATE_RULESET, _RESTRICT_SELF = 444, 446
_RIGHTS = (13, 14, 15, 15, 16)  # number of file rights that Landlock's versions 1 to 5 know
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent_process(parent: int) -> dict[str, bool]:
    """Leave the network namespace, and die with the process `parent`.

    Must run before any thread starts.
    """
    granted = {"network": _libc.unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC) == 0}
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # after unshare, which would clear it
    if os.getppid() != parent:  # the parent died before the signal was set
        os._exit(1)
    return granted


def lock(descriptors: int) -> dict[str, bool]:
    """Forbid opening files and sockets and starting processes.

    `descriptors` are all in use, numbered from 0. Returns the granted protections by name.
    """
    return {
        "files": _forbid_paths(),
        "descriptors": _tried(lambda: _limit(resource.RLIMIT_NOFILE, descriptors)),
        "writing": _tried(lambda: _limit(resource.RLIMIT_FSIZE, 0)),
        "processes": _forbid_processes(),
        "cores": _tried(lambda: _limit(resource.RLIMIT_CORE, 0)),
    }


def limit_job(cpu: float, memory: int, base: int) -> None:
    """Bound the next job: `cpu` further seconds, and `memory` bytes more than `base`.

    Both are soft limits, which the next job may raise again. Beyond the CPU limit the kernel
    sends SIGXCPU, which kills.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    seconds = math.ceil(used.ru_utime + used.ru_stime + cpu)
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, resource.getrlimit(resource.RLIMIT_CPU)[1]))
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = base + memory
    resource.setrlimit(
        resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard)
    )


@contextlib.contextmanager
def within(cpu: float, refuse: Callable[[], Exception]) -> Iterator[None]:
    """Raise `refuse()` in the block once it has used `cpu` seconds of processor time.

    Interrupts Python code, such as a parser's loop; a long call into a library is interrupted when
    it returns, and bounded by `limit_job`. Main thread only.
    """

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise refuse()

    before = signal.signal(signal.SIGPROF, interrupt)
    try:
        signal.setitimer(signal.ITIMER_PROF, cpu)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def address_space() -> int:
    """Return the bytes of address space in use."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def _limit(kind: int, value: int) -> None:
    resource.setrlimit(kind, (value, value))


def _tried(step: Callable[[], None]) -> bool:
    try:
        step()
    except (OSError, ValueError):
        return False
    return True


def _forbid_processes() -> bool:
    """Forbid fork; return True if it fails as intended.

    The kernel exempts root of the machine or container, so fork is tried.
    """
    if not _tried(lambda: _limit(resource.RLIMIT_NPROC, 0)):
        return False
    try:
        if (pid := os.fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
    except OSError:
        return True
    return False


def _forbid_paths() -> bool:
    """Forbid every access to files by path, and TCP if the kernel's Landlock supports it."""
    version = _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    files = (1 << _RIGHTS[min(version, len(_RIGHTS)) - 1]) - 1
    rules = (ctypes.c_uint64 * 2)(files, 3 if version >= 4 else 0)
    ruleset = _libc.syscall(
        _CREATE_RULESET, rules, ctypes.c_size_t(16 if version >= 4 else 8), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        return False
    try:
        return bool(_libc.syscall(_RESTRICT_SELF, ctypes.c_int(ruleset), ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)
