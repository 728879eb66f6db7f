"""Share the steps of a training among processes of one machine, which add up their gradients.

On a CPU two processes of one thread each train a small model faster than one of two threads.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, distributed, multiprocessing

Arguments = TypeVar("Arguments")


@dataclass(frozen=True)
class Ranks:
    """Define which of `count` processes this one is."""

    rank: int = 0
    count: int = 1

    @property
    def is_leader(self) -> bool:
        """Return True for the process that writes the log and the state."""
        return self.rank == 0

    def sum(self, numbers: Sequence[float], gradients: Sequence[Tensor] = ()) -> list[float]:
        """Return the sums of numbers over all ranks; gradients are summed in place."""
        if self.count == 1:
            return [*numbers]
        flat = torch.cat([torch.tensor(numbers), *(gradient.flatten() for gradient in gradients)])
        distributed.all_reduce(flat)
        summed, *parts = flat.split([len(numbers), *(gradient.numel() for gradient in gradients)])
        for gradient, part in zip(gradients, parts, strict=True):
            gradient.copy_(part.view_as(gradient))
        return summed.tolist()


def run_ranks(
    run: Callable[[Ranks, Arguments], None], arguments: Arguments, *, count: int, state: Path
) -> None:
    """Call `run` in `count` processes of one thread each, or in this process if it is one.

    run: a function of a module, which further processes import. state: they meet beside this file.
    """
    if count == 1:
        run(Ranks(), arguments)
        return
    rendezvous = state.with_suffix(".rendezvous").resolve()
    rendezvous.parent.mkdir(parents=True, exist_ok=True)
    rendezvous.unlink(missing_ok=True)
    multiprocessing.spawn(_run, args=(run, arguments, count, rendezvous), nprocs=count)


def _run(
    rank: int,
    run: Callable[[Ranks, Arguments], None],
    arguments: Arguments,
    count: int,
    rendezvous: Path,
) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", f"file://{rendezvous}", rank=rank, world_size=count)
    run(Ranks(rank, count), arguments)
