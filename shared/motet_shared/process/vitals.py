"""Read CPU time, scheduling delay and machine load of a process from the kernel.

The readings are counters, in seconds since the start of the process or the machine: two samples
give the usage in between, however far apart they are. Heartbeats carry them (`READINGS`). Values
that the kernel does not report (other systems than Linux) are left out.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

# Description of each reading, by its name in a heartbeat's load.
READINGS = {
    "uptime": "seconds of the process's own clock, which the others are to be divided by",
    "cpu": "CPU seconds of all its threads",
    "cpu_wait": "seconds that its threads were ready to run and had no core",
    "loop_cpu": "CPU seconds of the thread of its event loop",
    "loop_wait": "seconds that this thread was ready to run and had no core",
    "timer_lag": "seconds that periodic duties came too late",
    "machine_id": "which machine it is: processes with the same number share cores",
    "cores": "of the machine",
    "machine_cpu": "CPU seconds of all processes of the machine, on all cores",
    "gpus": "GPUs that the process could use: device files, within CUDA_VISIBLE_DEVICES",
    "machine_steal": "seconds that the machine's cores ran something else than the machine",
}
_FRESH = 0.4  # seconds for which a reading is cached: less than the heartbeat period
_TICK = os.sysconf("SC_CLK_TCK")
_NANO = 1e-9
_GPU_FILE = re.compile(r"nvidia\d+")  # /dev/nvidia0; a container has those of its own GPUs


def count_gpus(dev: Path = Path("/dev")) -> int:
    """Return the number of GPUs that this process could use, without asking the driver.

    dev: folder of device files. Those that CUDA_VISIBLE_DEVICES leaves out are not counted.
    """
    try:
        count = sum(_GPU_FILE.fullmatch(name) is not None for name in os.listdir(dev))
    except OSError:
        return 0
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return count
    named = [entry for entry in given.split(",") if entry.strip() not in ("", "-1")]
    return min(count, len(named))


class Vitals:
    """Read the vital signs of this process; create it on the thread of the event loop.

    `proc` is the kernel's proc folder and `dev` that of device files, others in tests. `late`
    returns the total lateness of periodic duties in seconds.
    """

    def __init__(
        self,
        late: Callable[[], float] = lambda: 0.0,
        proc: Path = Path("/proc"),
        dev: Path = Path("/dev"),
    ):
        self._late = late
        self._proc = proc
        self._loop = str(threading.get_native_id())
        self._began = time.monotonic()
        self._machine = _machine(proc, dev)
        self._waits: dict[str, float] = {}  # by thread, at the last read
        self._waited = 0.0  # of all threads, including ended ones
        self._read_at = float("-inf")
        self._last: dict[str, float] = {}

    def read(self) -> dict[str, float]:
        """Return the newest readings by their names in `READINGS`; do not change the result."""
        now = time.monotonic()
        if now - self._read_at >= _FRESH:
            self._read_at = now
            own = {
                "uptime": now - self._began,
                "cpu": time.process_time(),
                "timer_lag": self._late(),
            }
            self._last = own | self._machine | self._threads() | self._machine_usage()
        return self._last

    def _threads(self) -> dict[str, float]:
        """Read the scheduler's counters of each thread.

        A thread's counters vanish when it ends, so the growth of the waiting time is accumulated
        here.
        """
        found: dict[str, tuple[float, float]] = {}
        try:
            names = os.listdir(self._proc / "self/task")
        except OSError:
            return {}
        for name in names:
            try:
                cpu, wait, _ = (self._proc / "self/task" / name / "schedstat").read_bytes().split()
            except (OSError, ValueError):  # the thread has ended, or the kernel has no schedstat
                continue
            found[name] = int(cpu) * _NANO, int(wait) * _NANO
        if self._loop not in found:
            return {}
        self._waited += sum(
            max(0.0, wait - self._waits.get(name, 0.0)) for name, (_, wait) in found.items()
        )
        self._waits = {name: wait for name, (_, wait) in found.items()}
        loop_cpu, loop_wait = found[self._loop]
        return {"cpu_wait": self._waited, "loop_cpu": loop_cpu, "loop_wait": loop_wait}

    def _machine_usage(self) -> dict[str, float]:
        try:
            with (self._proc / "stat").open("rb") as file:
                user, nice, system, _, _, irq, softirq, steal = (
                    int(ticks) for ticks in file.readline().split()[1:9]
                )
        except (OSError, ValueError):
            return {}
        return {
            "machine_cpu": (user + nice + system + irq + softirq) / _TICK,
            "machine_steal": steal / _TICK,
        }


def _machine(proc: Path, dev: Path) -> dict[str, float]:
    """Return the machine's boot id as a number, its cores and its GPUs.

    Containers on one machine have different host names but share the boot id.
    """
    try:
        boot_id = (proc / "sys/kernel/random/boot_id").read_text()
    except OSError:
        return {}
    return {
        "machine_id": float(int(boot_id.replace("-", "")[:12], 16)),
        "cores": float(os.cpu_count() or 1),
        "gpus": float(count_gpus(dev)),
    }
