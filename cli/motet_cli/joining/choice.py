"""Choose the services that a joining machine runs, by its memory, cores and GPUs."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from motet_cli.joining.messages import ServiceOffer, StackOffer
from motet_cli.placement.gpus import list_gpus
from motet_cli.planning.engine_memory import CPU_OVERHEAD
from motet_models.capacity import format_bytes
from motet_models.free_memory import available_memory
from motet_shared.errors import ConfigError
from motet_shared.process.vitals import count_gpus

# What stacks are short of first comes first.
_ORDER = (
    *("decode", "prefill", "tokenizer", "encoder", "asr", "tts", "diffusion"),
    *("embedding", "ranking", "vad", "speakers"),
)
_ON_GPU = frozenset({"decode", "prefill"})
COUNTED = frozenset({"decode", "prefill", "tokenizer", "vad"})  # `--services ROLE=N`


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Describe a machine: cores, bytes of free memory, and free bytes of each GPU."""

    cores: int
    memory: int
    gpus: tuple[int, ...] = ()

    @classmethod
    def measure(cls, share: float) -> Machine:
        """Return this machine, of whose free memory `share` may be used."""
        free = [gpu.free for gpu in list_gpus().gpus] if count_gpus() else []
        return cls(
            cores=len(os.sched_getaffinity(0)),
            memory=int(share * available_memory()),
            gpus=tuple(int(share * one) for one in free),
        )

    def describe(self) -> str:
        gpus = f", GPUs with {', '.join(map(format_bytes, self.gpus))}" if self.gpus else ""
        return f"{self.cores} cores, {format_bytes(self.memory)} of free memory{gpus}"


@dataclass(frozen=True)
class Choice:
    """Hold whether a service is to run here, and why."""

    service: ServiceOffer
    taken: bool
    reason: str


def choose(offer: StackOffer, machine: Machine) -> list[Choice]:
    """Return a decision about each service that the stack offers.

    Services are taken in order of what stacks are short of, while there is a core and memory for
    each. A language model takes a GPU instead if it fits on one. Raises ConfigError if none fits.
    """
    cores, memory, gpus = machine.cores, machine.memory, sorted(machine.gpus)
    found = []
    for service in sorted(offer.services, key=lambda one: _ORDER.index(one.role)):
        need = service.memory
        gpu = next((one for one in gpus if service.role in _ON_GPU and one >= need), None)
        if gpu is not None:
            need = min(need, CPU_OVERHEAD)
        if need > memory:
            reason = f"needs {format_bytes(need)}, and {format_bytes(memory)} is left"
            found.append(Choice(service, False, reason))
        elif cores < 1:
            found.append(Choice(service, False, "no core is left"))
        else:
            cores, memory = cores - 1, memory - need
            if gpu is not None:
                gpus.remove(gpu)
            where = "" if gpu is None else ", on a GPU"
            found.append(Choice(service, True, f"{format_bytes(service.memory)}{where}"))
    if not any(choice.taken for choice in found):
        raise ConfigError(
            f"--services: none of the stack's services fits this machine ({machine.describe()});"
            " name one to run it all the same",
            param="--services",
        )
    return found


def wanted_services(offer: StackOffer, counts: Mapping[str, int]) -> list[Choice]:
    """Return the services of these roles, whatever the machine has. Raises ConfigError."""
    roles = list(dict.fromkeys(service.role for service in offer.services))
    for role, count in counts.items():
        if role not in roles:
            raise ConfigError(
                f"--services: {role!r} is not offered by this stack or token; choose of"
                f" {', '.join(roles)}",
                param="--services",
            )
        if count > 1 and role not in COUNTED:
            raise ConfigError(
                f"--services: {role}={count} is too many; a host runs one process of it",
                param="--services",
            )
    return [Choice(one, True, "as given") for one in offer.services if one.role in counts]


def parse_services(given: Sequence[str]) -> dict[str, int]:
    """Parse ROLE or ROLE=N, separated by commas or given one by one. Raises ConfigError."""
    found = {}
    for word in filter(None, ",".join(given).split(",")):
        role, separator, count = word.strip().partition("=")
        if not role.isalpha() or (separator and not (count.isdecimal() and 0 < int(count) < 1000)):
            raise ConfigError(
                f"--services: {word!r} is no role; give one such as decode or decode=2",
                param="--services",
            )
        found[role] = int(count) if separator else 1
    return found
