"""Describe processes of a stack as jobs for GPUs, and start them where they are placed."""

from __future__ import annotations

import itertools
import os
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from motet_cli.placement.devices import CPU, CUDA, ROLES
from motet_cli.placement.gpus import VISIBLE
from motet_cli.placement.placement import ENGINES, Job, Placement
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.memory import BOUNDS, checkpoint_bytes
from motet_shared.errors import ConfigError
from motet_shared.process.config import parse_bytes

# Arguments of `vllm serve` that multiply the GPUs of one engine.
_PARALLEL = {
    "--tensor-parallel-size": ("-tp",),
    "--pipeline-parallel-size": ("-pp",),
    "--data-parallel-size": ("-dp",),
}
_ELSEWHERE = ("--distributed-executor-backend", "--nnodes", "-n")  # may span several hosts


def job_of(spec: ChildSpec, env: Mapping[str, str] | None = None) -> Job | None:
    """Return what a process needs of GPUs; None if it computes on none in any case."""
    env = os.environ if env is None else env
    engine = option_of(spec.argv, "--engine")
    if spec.role not in ROLES or (engine and option_of(spec.argv, "--engine-url")):
        return None
    folder = option_of(spec.argv, "--model")
    job = Job(
        name=spec.name,
        role=spec.role,
        model=spec.model,
        weights=checkpoint_bytes(Path(folder)) if folder else 0,
    )
    if engine:
        return replace(job, is_foreign=True, gpus=_parallel(option_of(spec.argv, "--engine-args")))
    given = option_of(spec.argv, "--memory") if spec.role in ENGINES else ""
    other = ("--kv-memory", "--num-blocks", "--memory-share")
    is_bounded = any(map(env.get, BOUNDS)) or any(option_of(spec.argv, name) for name in other)
    is_open = spec.role in ENGINES and not is_bounded and not given
    return replace(job, is_engine=is_open, bound=parse_bytes(given) if given else 0)


def placed(spec: ChildSpec, placement: Placement | None, env: Mapping[str, str]) -> ChildSpec:
    """Return a process with the arguments and environment that start it where it is placed."""
    place = None if placement is None else placement.of(spec.name)
    is_foreign = bool(option_of(spec.argv, "--engine"))
    if place is None:
        if spec.role in ROLES and not is_foreign and env.get("MOTET_DEVICE", CPU) != CPU:
            return replace(spec, argv=(*spec.argv, "--device", CPU))
        return spec
    device = () if is_foreign else ("--device", CUDA)
    return replace(
        spec,
        argv=(*spec.argv, *device, *place.memory_arguments()),
        env={**spec.env, **place.variables()},
        gpus=tuple(gpu.key for gpu in place.gpus),
    )


def moved(spec: ChildSpec, others: Sequence[ChildSpec], gpus: Sequence[str]) -> ChildSpec:
    """Return another instance of a process on the GPUs with the fewest processes.

    others: the processes that run. gpus: UUIDs of all GPUs. Raises ConfigError for an engine if
    others are on each of them: their memory is divided already.
    """
    if not spec.gpus:
        return spec
    busy = {key: sum(key in other.gpus for other in others) for key in gpus}
    chosen = sorted(gpus, key=lambda key: busy[key])[: len(spec.gpus)]
    is_engine = spec.role in ENGINES
    if is_engine and (len(chosen) < len(spec.gpus) or any(busy[key] for key in chosen)):
        raise ConfigError(
            f"ROLE=N: {spec.role} computes on GPUs, and none is free for another instance; their"
            " memory was divided at the start, so give the number there (--decode N)",
            param="ROLE=N",
        )
    return replace(spec, gpus=tuple(chosen), env={**spec.env, VISIBLE: ",".join(chosen)})


def option_of(argv: Sequence[str], name: str) -> str:
    """Return the last value of an option, given as two arguments or with `=`; "" without it."""
    found = ""
    for argument, value in itertools.zip_longest(argv, argv[1:], fillvalue=""):
        if argument == name:
            found = value
        elif argument.startswith(f"{name}="):
            found = argument.partition("=")[2]
    return found


def _parallel(text: str) -> int:
    """Return the GPUs that vLLM needs on this host by its arguments; 0: all that it may use."""
    words = shlex.split(text)
    if any(option_of(words, name) not in ("", "mp", "uni", "1") for name in _ELSEWHERE):
        return 0
    count = 1
    for name, aliases in _PARALLEL.items():
        underscored = f"--{name[2:].replace('-', '_')}"
        given = [option_of(words, one) for one in (name, underscored, *aliases)]
        count *= max(int(one) if one.isdecimal() else 1 for one in given)
    return count
