"""Decide which process computes on which GPU, and how much of its memory it may use.

`motet up` starts processes as decided here, and `motet plan --stack` prints it. Each process gets a
GPU of its own as long as there are enough; then processes share, those with the fewest on them
first. Of a GPU's free memory, `--memory-share` is divided: first what is not a language model gets
what its weights need, or the share of its role; then language models get their weights, and an
equal part of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from motet_cli.placement.devices import AUTO, CPU, CUDA, ROLES, Devices
from motet_cli.placement.gpus import VISIBLE, Gpu, GpuListing
from motet_models.capacity import format_bytes
from motet_shared.errors import ConfigError

ENGINES = ("decode", "prefill")  # roles whose memory is bounded by --memory
CONTEXT = 512 << 20  # bytes: the CUDA context of a process, and its libraries' workspaces
_BESIDES_WEIGHTS = 0.25  # share of the weights that a step of other services takes


@dataclass(frozen=True, kw_only=True)
class Job:
    """Describe a process that may compute on GPUs.

    weights: bytes on disk. gpus: how many it needs at a time; 0: all that it may use. is_engine: a
    language model of Motet's own engine, whose memory is to be bounded. is_foreign: another engine,
    which takes what it finds. bound: bytes that it is limited to already; 0: not limited.
    """

    name: str
    role: str
    model: str | None = None
    weights: int = 0
    gpus: int = 1
    is_engine: bool = False
    is_foreign: bool = False
    bound: int = 0


@dataclass(frozen=True, kw_only=True)
class Placed:
    """Hold the place of a process.

    gpus: those that it sees; none: the CPU. memory: bytes that it may use; 0: it has no bound.
    share: of a GPU whose memory is unknown; 0.0: of all others. is_capped: its allocator refuses
    more than `memory`.
    """

    job: Job
    gpus: tuple[Gpu, ...] = ()
    memory: int = 0
    share: float = 0.0
    is_capped: bool = False

    def variables(self) -> dict[str, str]:
        """Return the variables that limit the process to its GPUs and memory; {} on the CPU."""
        if not self.gpus:
            return {}
        cap = {"MOTET_GPU_MEMORY": str(self.memory)} if self.is_capped else {}
        return {VISIBLE: ",".join(gpu.key for gpu in self.gpus), **cap}

    def memory_arguments(self) -> list[str]:
        """Return the arguments that bound the memory of Motet's own engine."""
        if self.job.bound or not self.job.is_engine:
            return []
        if self.memory:
            return ["--memory", str(self.memory)]
        return ["--memory-share", f"{self.share:.4f}"] if self.share else []


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Hold the place of each process by its name, and the GPUs that are visible."""

    gpus: tuple[Gpu, ...] = ()
    places: Mapping[str, Placed] = field(default_factory=dict)

    def of(self, name: str) -> Placed | None:
        """Return the place of a process; None for one that computes on the CPU."""
        found = self.places.get(name)
        return found if found is not None and found.gpus else None

    def on(self, gpu: Gpu) -> list[Placed]:
        """Return the processes on a GPU."""
        return [one for one in self.places.values() if gpu in one.gpus]

    def unused(self) -> list[Gpu]:
        """Return the GPUs on which nothing computes."""
        return [gpu for gpu in self.gpus if not self.on(gpu)]

    def describe(self) -> list[str]:
        """Return lines for the log: what each GPU computes, and which are not used."""
        lines = [
            f"cuda:{gpu.number} ({gpu.name}): {', '.join(map(_described, placed))}"
            + (" share it" if len(placed) > 1 else "")
            for gpu in self.gpus
            if (placed := self.on(gpu))
        ]
        if unused := self.unused():
            names = ", ".join(f"cuda:{gpu.number} ({gpu.name})" for gpu in unused)
            lines.append(f"not used: {names}; --device cuda or more instances would")
        return lines


def _described(placed: Placed) -> str:
    memory = f" ({format_bytes(placed.memory)})" if placed.memory else ""
    return placed.job.name + memory


def place(
    jobs: Sequence[Job],
    devices: Devices,
    listing: GpuListing,
    share: float = 0.85,
    shares: Mapping[str, float] | None = None,
) -> Placement:
    """Return the place of each job. share: of each GPU's free memory. shares: those of roles.

    Raises ConfigError for a GPU that is not there, and for roles whose shares exceed a GPU.
    """
    chosen: dict[str, tuple[Gpu, ...]] = {}
    load: dict[int, list[Job]] = {gpu.number: [] for gpu in listing.gpus}
    order = sorted(jobs, key=lambda job: (job.gpus != 0, -job.gpus, ROLES.index(job.role)))
    for job in order:
        allowed = _allowed(job, devices, listing)
        chosen[job.name] = _choose(job, allowed, load)
        for gpu in chosen[job.name]:
            load[gpu.number].append(job)
    places = {job.name: Placed(job=job, gpus=chosen[job.name]) for job in jobs}
    for gpu in listing.gpus:
        here = [one for one in places.values() if gpu in one.gpus]
        for placed in _divide(gpu, here, share, shares or {}):
            places[placed.job.name] = placed
    return Placement(gpus=listing.gpus, places=places)


def _allowed(job: Job, devices: Devices, listing: GpuListing) -> tuple[Gpu, ...]:
    """Return the GPUs that a job may use; none: it computes on the CPU."""
    wanted = devices.wanted(job.role, job.model)
    if job.is_foreign and not devices.names(job.role, job.model):
        wanted = AUTO  # another engine computes on GPUs if there are some
    if wanted == CPU or (wanted == AUTO and not listing.gpus):
        return ()
    if not listing.gpus:
        raise ConfigError(
            f"--device: {job.name} is to compute on {wanted}, but no GPU is visible:"
            f" {listing.problem}; give cpu, or make a GPU visible",
            param="--device",
        )
    if wanted in (AUTO, CUDA):
        return listing.gpus
    numbers = [int(one.partition(":")[2] or 0) for one in wanted.split(",")]
    if missing := [number for number in numbers if number >= len(listing.gpus)]:
        raise ConfigError(
            f"--device: cuda:{missing[0]} is not visible; {len(listing.gpus)} GPUs are, from cuda:0",
            param="--device",
        )
    return tuple(listing.gpus[number] for number in dict.fromkeys(numbers))


def _choose(job: Job, allowed: Sequence[Gpu], load: Mapping[int, list[Job]]) -> tuple[Gpu, ...]:
    """Return the `job.gpus` least loaded of the allowed GPUs: with the fewest jobs, then bytes."""
    if not allowed or not job.gpus:
        return tuple(allowed)
    if job.gpus > len(allowed):
        raise ConfigError(
            f"--engine-args: {job.name} needs {job.gpus} GPUs at a time, but {len(allowed)} are"
            " visible to it; lower its parallel sizes, or see docs/scale.md for several hosts",
            param="--engine-args",
        )

    def busy(gpu: Gpu) -> tuple[int, int, int]:
        here = load[gpu.number]
        return len(here), sum(one.weights for one in here), gpu.number

    return tuple(sorted(sorted(allowed, key=busy)[: job.gpus], key=lambda gpu: gpu.number))


def _divide(
    gpu: Gpu, here: Sequence[Placed], share: float, shares: Mapping[str, float]
) -> Iterable[Placed]:
    """Yield the processes of a GPU with the memory that each may use."""
    if not here:
        return
    of_role = {role: sum(one.job.role == role for one in here) for role in shares}
    _check_shares(gpu, {role: shares[role] for role, count in of_role.items() if count})
    budget = max(0, int(share * gpu.free) - CONTEXT * (len(here) - 1))
    known, open_engines = 0, []
    for placed in here:
        job = placed.job
        if job.bound:
            known += job.bound
            yield replace(placed, memory=job.bound)
        elif job.role in shares:
            part = shares[job.role] / of_role[job.role]
            memory = int(part * gpu.free)
            known += memory
            yield replace(placed, memory=memory, share=part, is_capped=not job.is_engine)
        elif job.is_engine:
            open_engines.append(placed)
        else:
            known += 0 if job.is_foreign else job.weights + int(_BESIDES_WEIGHTS * job.weights)
    yield from _divided(open_engines, gpu, budget - known, share / len(here))


def _divided(engines: Sequence[Placed], gpu: Gpu, left: int, share: float) -> Iterable[Placed]:
    """Yield engines with their weights and an equal part of what is left besides."""
    weights = sum(placed.job.weights for placed in engines)
    for placed in engines:
        if not gpu.free:
            yield replace(placed, share=share)
        elif left <= weights:  # quantized on load they may still fit, which the engines check
            yield replace(placed, memory=max(1, left // len(engines)))
        else:
            rest = (left - weights) // len(engines)
            yield replace(placed, memory=placed.job.weights + rest)


def _check_shares(gpu: Gpu, shares: Mapping[str, float]) -> None:
    if sum(shares.values()) > 1:
        told = ", ".join(f"{role}={share:g}" for role, share in shares.items())
        raise ConfigError(
            f"--memory-share: {told} are more than all of cuda:{gpu.number}; give shares that add"
            " up to 1 at most",
            param="--memory-share",
        )
