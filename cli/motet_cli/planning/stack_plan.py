"""Report where `motet up` places the processes of a stack: `motet plan --stack`.

The placement is the one of `motet up` with the same flags on the same GPUs
(`motet_cli.supervision.up.stack_of`); nothing is started.
"""

from __future__ import annotations

import json
import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from motet_cli.placement.gpus import Gpu, GpuListing
from motet_cli.placement.jobs import job_of, option_of
from motet_cli.placement.placement import ENGINES, Placement
from motet_cli.supervision.child import ChildSpec
from motet_cli.supervision.stack import Stack
from motet_cli.supervision.up import describe_gpus, stack_of
from motet_models.capacity import format_bytes
from motet_models.roofline import GPUS
from motet_shared.errors import ConfigError

# Tokens of KV cache that an engine of this folder has in so many bytes, on a GPU or not.
TokensOf = Callable[[Path, int, bool], int]


@dataclass(frozen=True, kw_only=True)
class Row:
    """Describe one process; sizes in bytes.

    devices: `cpu`, or GPUs such as `cuda:0`. memory: its bound; 0: none. kv_tokens: that fit into
    the KV cache of a language model; 0: of other processes.
    """

    process: str
    role: str
    model: str | None
    devices: list[str]
    memory: int
    weights: int
    kv_tokens: int


def run(args: Namespace, tokens_of: TokensOf) -> int:
    """Print the placement of the flags of `motet up` behind `--stack`."""
    from motet_cli.main import up_arguments  # it imports this module's command

    stack = stack_of(up_arguments(args.stack), _listing(args))
    found = rows(stack, tokens_of)
    gpus = () if stack.placement is None else stack.placement.gpus
    notes = describe_gpus(stack)
    if args.json:
        document = {
            "gpus": [asdict(gpu) for gpu in gpus],
            "processes": [asdict(row) for row in found],
            "notes": notes,
        }
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        console = Console(highlight=False)
        console.print(_table(found))
        for note in notes:
            console.print(note)
    return 0


def _listing(args: Namespace) -> GpuListing | None:
    """Return `--gpus` GPUs of the kind `--gpu`; None: those of this machine."""
    if args.gpus is None:
        if args.gpu is not None:
            raise ConfigError(
                "--gpus: is not given; say how many of --gpu there are", param="--gpus"
            )
        return None
    if args.gpus < 1:
        raise ConfigError(f"--gpus: {args.gpus} is too few; give at least 1", param="--gpus")
    named = {name.lower(): (name, gpu) for name, gpu in GPUS.items()}
    if args.gpu is None or args.gpu.lower() not in named:
        raise ConfigError(
            f"--gpu: {args.gpu!r} is unknown; choose one of {', '.join(GPUS)}", param="--gpu"
        )
    name, gpu = named[args.gpu.lower()]
    return GpuListing(
        tuple(
            Gpu(number=n, key=f"GPU-{n}", name=name, total=gpu.memory, free=gpu.memory)
            for n in range(args.gpus)
        )
    )


def rows(stack: Stack, tokens_of: TokensOf) -> list[Row]:
    """Return the processes of a stack that load a model, those loaded on demand last."""
    later = [spec for _, specs in stack.on_demand() for spec in specs]
    return [
        _row(spec, stack.placement, tokens_of) for spec in _loading([*stack.services(), *later])
    ]


def _loading(specs: Sequence[ChildSpec]) -> list[ChildSpec]:
    return [spec for spec in specs if job_of(spec) is not None]


def _row(spec: ChildSpec, placement: Placement | None, tokens_of: TokensOf) -> Row:
    job, place = job_of(spec), None if placement is None else placement.of(spec.name)
    assert job is not None
    memory = job.bound or (place.memory if place is not None else 0)
    is_engine = job.role in ENGINES and not job.is_foreign
    folder = Path(option_of(spec.argv, "--model"))
    return Row(
        process=spec.name,
        role=spec.role,
        model=spec.model,
        devices=[f"cuda:{gpu.number}" for gpu in place.gpus] if place is not None else ["cpu"],
        memory=memory,
        weights=job.weights,
        kv_tokens=tokens_of(folder, memory, place is not None) if is_engine and memory else 0,
    )


def _table(found: Sequence[Row]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("process", "model", "device"):
        table.add_column(name)
    for name in ("weights", "memory", "tokens of KV cache"):
        table.add_column(name, justify="right")
    for row in found:
        numbers: list[Any] = [
            format_bytes(row.weights) if row.weights else "",
            format_bytes(row.memory) if row.memory else "",
            f"{row.kv_tokens:,}" if row.kv_tokens else "",
        ]
        table.add_row(row.process, row.model or "", ", ".join(row.devices), *numbers)
    return table
