"""Measure the start of a process by stage, and import libraries without garbage collection.

    with importing():
        from .service import Service
    ...
    START.mark("weights")  # assigns the time since the previous mark

Only processes that are started by `run` are measured: `START` takes no marks in other processes.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

# Start time of a process that has exec'ed another program; the kernel counts from the first
# program.
_AGAIN = "MOTET_PROCESS_BEGAN"


def now() -> float:
    """Return seconds since the machine's boot, including suspend, as the kernel counts them."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def process_began(stat: Path = Path("/proc/self/stat")) -> float:
    """Return the start time of this process, or of its exec'ed program, on the clock of `now`.

    Returns the current time if the kernel does not report it.
    """
    if again := os.environ.get(_AGAIN):
        return float(again)
    try:
        ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return now()
    return ticks / os.sysconf("SC_CLK_TCK")


def go_on() -> None:
    """Record the time before this process execs another program."""
    os.environ[_AGAIN] = str(now())


def begin_anew() -> None:
    """Begin the measurement in a forked process, which did not spend its parent's import time."""
    os.environ.pop(_AGAIN, None)
    START.forget()
    START.begin(now())


class Start:
    """Measure the seconds of each stage: interpreter, imports, …, registered.

    Stages are listed in the order of their first mark.
    """

    def __init__(self, clock: Callable[[], float] = now) -> None:
        self.stages: dict[str, float] = {}
        self._clock = clock
        self._last: float | None = None  # None before the begin and after the end

    def begin(self, began: float) -> None:
        """Begin the first stage at the time `began`; later calls have no effect."""
        if self._last is None and not self.stages:
            self._last = began

    def mark(self, stage: str) -> None:
        """Add the time since the last mark to `stage`; do nothing before `begin` and after `end`."""
        if self._last is not None:
            at = self._clock()
            self.stages[stage] = self.stages.get(stage, 0.0) + max(at - self._last, 0.0)
            self._last = at

    def forget(self) -> None:
        """Reset to the state before `begin`."""
        self.stages.clear()
        self._last = None

    def begin_again(self) -> None:
        """Begin the running measurement again from now on."""
        if self._last is not None:
            self.stages.clear()
            self._last = self._clock()

    def end(self) -> None:
        """End the measurement: later marks have no effect."""
        self._last = None

    @property
    def seconds(self) -> float:
        """Return the seconds of all stages together."""
        return sum(self.stages.values())

    def told(self) -> dict[str, float]:
        """Return fields for a log line: the total as `start`, and each stage; {} if never begun."""
        if not self.stages:
            return {}
        return {
            "start": round(self.seconds, 3),
            **{name: round(took, 3) for name, took in self.stages.items()},
        }


START = Start()


@contextmanager
def importing() -> Iterator[None]:
    """Disable garbage collection while a service imports its libraries.

    The collector would scan all imported objects again and again, which takes an eighth of the time
    of importing torch and transformers, and frees nothing, since modules stay loaded. The imported
    objects are then frozen, so that later collections skip them.
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


def collect_rarely() -> None:
    """Exclude loaded objects from garbage collection from now on, and collect less often.

    Frames are short-lived lists without cycles, but at the default thresholds the collector would
    search them for cycles several times per engine step, and occasionally search everything that
    the libraries have loaded: that stalls all streams of a tokenizer for a third of a second.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
