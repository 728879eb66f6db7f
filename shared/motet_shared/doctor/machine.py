"""Rules about machines: who has their cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .finding import Finding, Layer, found
from .window import Seen, Window

# A process is starved if its threads wait for a core for such a share of the time that they want one, and for so many
# seconds per second at the least.
STARVED = 0.3
STARVED_RATE = 0.2
# Somebody else is to blame if he takes so many cores, and such a share of what the starved have for themselves.
OTHERS = 0.3
OTHERS_SHARE = 0.5
FREE_CORES = 0.5  # of a machine: below, none is free


def starved(seen: Seen) -> bool:
    waited = seen.rate("wait")
    return waited >= STARVED_RATE and waited >= STARVED * (waited + seen.rate("cpu"))


def taken_by_others(machine: Sequence[Seen]) -> float:
    """Cores that others than these processes take, those included that the machine itself did not get."""
    everybody = max(seen.rate("machine_cpu") + seen.rate("machine_steal") for seen in machine)
    return max(0.0, everybody - sum(seen.rate("cpu") for seen in machine))


def free_cores(machine: Sequence[Seen]) -> float:
    return machine[0].now("cores") - max(seen.rate("machine_cpu") + seen.rate("machine_steal") for seen in machine)


def has_free_core(window: Window) -> Callable[[Seen], bool]:
    """Tells of an instance whether its machine has; of one whose machine is not known, that it has."""
    crowded = [seen for machine in window.machines if free_cores(machine) < FREE_CORES for seen in machine]
    return lambda seen: seen not in crowded


def cpu_short(window: Window) -> list[Finding]:
    """Processes are ready to run and have no core: others of the machine have them, or they themselves are too many."""
    return [finding for machine in window.machines if (finding := _short(window, machine)) is not None]


def _short(window: Window, machine: Sequence[Seen]) -> Finding | None:
    waiting = [seen for seen in machine if starved(seen)]
    if not waiting:
        return None
    others, waited = taken_by_others(machine), sum(seen.rate("wait") for seen in waiting)
    had = sum(seen.rate("cpu") for seen in waiting)
    foreign = others >= OTHERS and others >= OTHERS_SHARE * had
    if not foreign and free_cores(machine) >= FREE_CORES:
        return None
    share = waited / (waited + had)
    held = max(seen.mean("active") for seen in waiting)
    numbers = {
        "waiting_share": share,
        "waiting": waited,
        "cores_of_others": others,
        "stolen": max(seen.rate("machine_steal") for seen in machine),
        "cores": machine[0].now("cores"),
    }
    names = [seen.name for seen in sorted(waiting, key=lambda seen: -seen.rate("wait"))]
    return found(
        "cpu_neighbour" if foreign else "cpu_full",
        "Others on this machine have the cores that these processes are ready to run on."
        if foreign
        else "This stack is more than the cores of its machine can run.",
        Layer.L0,
        "cores",
        names,
        numbers,
        "stop or move what else runs there (top -o %CPU; ps -eo pid,pcpu,comm --sort=-pcpu), or give it other cores: "
        "taskset -pc CORES PID, compose's cpuset"
        if foreign
        else "another machine for some of it, or fewer threads: decode --threads N (MOTET_THREADS)",
        cost=share * max(held, 1.0),
        requests=window.requests,
    )
