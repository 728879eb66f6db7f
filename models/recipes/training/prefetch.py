"""Make batches ahead of the step that needs them, in worker processes."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from torch.utils.data import DataLoader, Dataset

Batch = TypeVar("Batch")
_AHEAD = 4  # batches that a worker makes ahead


class _Made(Dataset[Batch], Generic[Batch]):
    """Hold a function of the step as a data set."""

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> Batch:
        """Return the batch of a step."""
        return self.make(step)


def prefetched(make: Callable[[int], Batch], steps: range, *, workers: int = 0) -> Iterable[Batch]:
    """Return `make(step)` of each step, in order.

    workers: processes that make them ahead, forked from this one; 0 makes each when it is needed.
    They may compute on no GPU.
    """
    return DataLoader(
        _Made(make),
        batch_size=None,
        sampler=steps,
        collate_fn=_unchanged,
        num_workers=workers,
        prefetch_factor=_AHEAD if workers else None,
        multiprocessing_context="fork" if workers else None,
    )


def _unchanged(batch: Batch) -> Batch:
    return batch
