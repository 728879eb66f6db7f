"""Define rules about machines: contention for their cores."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from .finding import Finding, Layer, found
from .window import InstanceWindow, ObservationWindow

# A process is starved if its threads wait for a core for STARVED of the time that they want one,
# and for at least STARVED_RATE seconds per second.
STARVED = 0.3
STARVED_RATE = 0.2
# Other processes are the cause if they take OTHERS cores, and OTHERS_SHARE of what the starved
# processes have.
OTHERS = 0.3
OTHERS_SHARE = 0.5
FREE_CORES = 0.5  # a machine with fewer has no free core


def starved(instance: InstanceWindow) -> bool:
    """Return True if the process waits too much for cores."""
    waited = instance.rate("cpu_wait")
    return waited >= STARVED_RATE and waited >= STARVED * (waited + instance.rate("cpu"))


def taken_by_others(machine: Sequence[InstanceWindow]) -> float:
    """Return the cores used by other processes, including time stolen from the machine."""
    used_cores = max(
        instance.rate("machine_cpu") + instance.rate("machine_steal") for instance in machine
    )
    return max(0.0, used_cores - sum(instance.rate("cpu") for instance in machine))


def free_cores(machine: Sequence[InstanceWindow]) -> float:
    """Return the unused cores of a machine."""
    return machine[0].now("cores") - max(
        instance.rate("machine_cpu") + instance.rate("machine_steal") for instance in machine
    )


def has_free_core(window: ObservationWindow) -> Callable[[InstanceWindow], bool]:
    """Return a predicate for instances whose machine has a free core.

    It is True for instances whose machine is unknown.
    """
    crowded = [
        instance
        for machine in window.machines
        if free_cores(machine) < FREE_CORES
        for instance in machine
    ]
    return lambda instance: instance not in crowded


def cpu_short(window: ObservationWindow) -> list[Finding]:
    """Find machines on which processes are ready to run and have no core.

    Either other processes use the cores, or the stack's own processes are too many.
    """
    return [
        finding for machine in window.machines if (finding := _short(window, machine)) is not None
    ]


def _short(window: ObservationWindow, machine: Sequence[InstanceWindow]) -> Finding | None:
    waiting = [instance for instance in machine if starved(instance)]
    if not waiting:
        return None
    others, waited = (
        taken_by_others(machine),
        sum(instance.rate("cpu_wait") for instance in waiting),
    )
    had = sum(instance.rate("cpu") for instance in waiting)
    foreign = others >= OTHERS and others >= OTHERS_SHARE * had
    if not foreign and free_cores(machine) >= FREE_CORES:
        return None
    share = waited / (waited + had)
    affected = max(instance.mean("active") for instance in waiting)
    numbers = {
        "waiting_share": share,
        "waiting": waited,
        "cores_of_others": others,
        "stolen": max(instance.rate("machine_steal") for instance in machine),
        "cores": machine[0].now("cores"),
    }
    names = [
        instance.name
        for instance in sorted(waiting, key=lambda instance: -instance.rate("cpu_wait"))
    ]
    return found(
        "cpu_neighbour" if foreign else "cpu_full",
        "Other programs of this machine use the cores that these processes wait for."
        if foreign
        else "The processes of this stack need more cores than the machine has.",
        Layer.L0,
        "cores",
        names,
        numbers,
        "stop or move other programs of the machine (top -o %CPU; "
        "ps -eo pid,pcpu,comm --sort=-pcpu), or restrict them to other cores: "
        "taskset -pc CORES PID, compose's cpuset"
        if foreign
        else "move some instances to another machine, or use fewer threads: "
        "decode --threads N (MOTET_THREADS)",
        cost=share * max(affected, 1.0),
        requests=window.requests,
    )
