"""Measure the CPU time of a block of code, which other processes do not lengthen."""

from __future__ import annotations

import resource
from types import TracebackType

import psutil


class CpuTime:
    """Measure the CPU seconds that this process and its descendants use within `with`.

    Descendants that end within the block count if their parents waited for them.
    """

    def __enter__(self) -> CpuTime:
        self._began = _used()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.seconds = _used() - self._began


def _used() -> float:
    """Return the seconds that this process and its descendants have used so far."""
    used = 0.0
    for process in psutil.Process().children(recursive=True):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended
            continue
        used += times.user + times.system + times.children_user + times.children_system
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        used += usage.ru_utime + usage.ru_stime
    return used
