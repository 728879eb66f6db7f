"""How long a process took until it was ready, by stage; and imports that do not stop to look for garbage.

    with importing():
        from .service import Service
    ...
    START.mark("weights")  # what was done since the mark before it

Only what `run` starts is told of: `START` takes no marks in a process that is no actor of its own.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# When a process that goes on as another program did so; the kernel counts from its first one.
_AGAIN = "MOTET_PROCESS_BEGAN"


def now() -> float:
    """Seconds since the machine was started, its sleep included, as the kernel counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_began(stat: Path = Path("/proc/self/stat")) -> float:
    """When this process, or the program that it goes on with, was started, by `now`; `now` where nobody tells."""
    if again := os.environ.get(_AGAIN):
        return float(again)
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return now()
    return ticks / os.sysconf("SC_CLK_TCK")


def go_on() -> None:
    """To be called before this process becomes another program."""
    os.environ[_AGAIN] = str(now())


def begin_anew() -> None:
    """To be called in a process that was forked: what the one before it has imported took no time of its own."""
    os.environ.pop(_AGAIN, None)
    START.forget()


class Start:
    """Seconds of each stage, in the order in which they were first marked: interpreter, imports, …, registered."""

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self.stages: dict[str, float] = {}
        self._clock = clock
        self._last: float | None = None  # None: it has not begun, or has ended

    def begin(self, began: float) -> None:
        """The first stage began then. Later calls change nothing."""
        if self._last is None and not self.stages:
            self._last = began

    def mark(self, stage: str) -> None:
        """What was done since the last mark belongs to `stage`."""
        if self._last is not None:
            at = self._clock()
            self.stages[stage] = self.stages.get(stage, 0.0) + max(at - self._last, 0.0)
            self._last = at

    def forget(self) -> None:
        """As if nothing had begun."""
        self.stages.clear()
        self._last = None

    def end(self) -> None:
        """It is ready: what comes is no part of its start."""
        self._last = None

    @property
    def seconds(self) -> float:
        return sum(self.stages.values())

    def told(self) -> dict[str, float]:
        """For a log line: `start`, which is all of it, and the stages; nothing if it never began."""
        if not self.stages:
            return {}
        return {"start": round(self.seconds, 3), **{name: round(took, 3) for name, took in self.stages.items()}}


START = Start()


@contextmanager
def importing() -> Iterator[None]:
    """Within, a service imports what it needs.

    The collector would look through all that the libraries have made so far again and again, an eighth of the time
    that importing torch and transformers takes, and find nothing: modules stay. Nor does it look there later.
    """
    START.begin(process_began())
    START.mark("interpreter")
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
    START.mark("imports")
