"""Define rules about GPUs: those on which nothing computes."""

from __future__ import annotations

from collections.abc import Sequence

from .finding import Finding, Layer, found
from .window import InstanceWindow, ObservationWindow

# Roles whose services can compute on a GPU.
ROLES = ("decode", "prefill", "diffusion", "tts", "asr", "encoder", "embedding", "ranking")
SAVED = 0.5  # share of a request's time that a GPU saves at least, beside a CPU's cores


def gpu_unused(window: ObservationWindow) -> list[Finding]:
    """Find machines with GPUs on which no process of the stack computes.

    A machine has as many GPUs as the process that sees most of them.
    """
    return [
        finding for machine in window.machines if (finding := _unused(window, machine)) is not None
    ]


def used_gpus(machine: Sequence[InstanceWindow]) -> float:
    """Return how many GPUs the processes of a machine compute on."""
    own = {instance.now("gpu") for instance in machine if "gpu" in instance.last.load}
    return len(own) + sum(instance.now("gpus_held") for instance in machine)


def _unused(window: ObservationWindow, machine: Sequence[InstanceWindow]) -> Finding | None:
    present = max(instance.now("gpus") for instance in machine)
    used = used_gpus(machine)
    if used >= present:
        return None
    on_cpu = [
        instance
        for instance in machine
        if instance.last.role in ROLES and not {"gpu", "gpus_held"} & instance.last.load.keys()
    ]
    return found(
        "gpu_unused",
        "The machine has GPUs on which no process of this stack computes.",
        Layer.L0,
        "gpus",
        [instance.name for instance in on_cpu or machine],
        {"gpus": present, "used": used, "processes_on_cpu": float(len(on_cpu))},
        "compute there: motet up --device cuda, or more instances (motet scale decode=N), or the"
        " profile gpu of compose.yaml; leave GPUs to others by CUDA_VISIBLE_DEVICES",
        cost=SAVED * sum(instance.mean("active") for instance in on_cpu),
        requests=window.requests,
    )
