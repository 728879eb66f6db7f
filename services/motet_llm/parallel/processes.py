"""Start the processes of a group's ranks, and end them."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from typing import Protocol

from .commands import Report
from .forks import RankForks
from .link import Link, pair
from .worker import run_rank

log = logging.getLogger(__name__)

_ENDS_WITHIN = 5.0  # seconds until a rank that does not end by itself is killed
# Variables of the environment that a rank needs; the others may be secrets.
_KEPT = ("MOTET_CACHE", "MOTET_NATIVE", "MOTET_HELPER")
_forks: RankForks | None = None


class Process(Protocol):
    """Define what is used of a child process, as in `subprocess.Popen`."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


def prepare_forks() -> None:
    """Have ranks forked from now on, without imports of their own.

    Called by a process that has imported all that ranks need, and has no threads yet; else ranks
    are started as programs.
    """
    global _forks
    try:
        _forks = RankForks(_run_forked)
    except OSError as error:
        log.warning("ranks are started as programs: %s", error)


def _run_forked(descriptor: int, leader: int) -> int:
    kept = _environment(os.environ)
    os.environ.clear()
    os.environ.update(kept)
    return run_rank(descriptor, leader)


class RankProcess:
    """Run one rank as a child process. It ends when its link is closed, also by the leader's end."""

    def __init__(self, number: int):
        """Start the process. Raises OSError."""
        self.number = number
        own, its = pair()
        try:
            self._process = _start(number, its)
        finally:
            os.close(its)
        self.link: Link[Report] = Link(own, Report)

    @property
    def pid(self) -> int:
        return self._process.pid

    def ended(self) -> str:
        """Return how the process ended; empty: it runs."""
        try:
            status = self._process.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return ""
        if status < 0:
            return f"(process {self.pid}) was ended by {signal.Signals(-status).name}"
        return f"(process {self.pid}) ended with status {status}"

    def close(self, *, at_once: bool = False) -> None:
        """End the process, and wait for its end; at_once: whatever it is doing."""
        self.link.shutdown()
        if at_once:
            self._process.kill()
        try:
            self._process.wait(timeout=_ENDS_WITHIN)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _start(number: int, descriptor: int) -> Process:
    """Start the process of a rank, forked if it can be. Raises OSError."""
    if _forks is not None:
        try:
            return _forks.fork(number, descriptor)
        except OSError as error:
            log.warning("rank %d is started as a program: %s", number, error)
    return subprocess.Popen(
        [sys.executable, "-m", "motet_llm.parallel", str(descriptor), str(os.getpid())],
        pass_fds=(descriptor,),
        stdin=subprocess.DEVNULL,
        env=_environment(os.environ),
    )


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    return {
        name: value
        for name, value in given.items()
        if name in _KEPT or not name.startswith("MOTET_")
    }
