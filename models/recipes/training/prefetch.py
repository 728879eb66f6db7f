"""Make batches ahead of the step that needs them, in worker processes."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

Batch = TypeVar("Batch")
_AHEAD = 4  # batches that a worker makes ahead


class _Made(Dataset[bytes], Generic[Batch]):
    """Hold a function of the step as a data set of pickles.

    Bytes come through a pipe, tensors through shared memory: of that, containers may have 64 MB.
    """

    def __init__(self, make: Callable[[int], Batch]) -> None:
        self.make = make

    def __getitem__(self, step: int) -> bytes:
        """Return the batch of a step."""
        return pickle.dumps(self.make(step), protocol=pickle.HIGHEST_PROTOCOL)


def prefetched(make: Callable[[int], Batch], steps: range, *, workers: int = 0) -> Iterable[Batch]:
    """Return `make(step)` of each step, in order.

    workers: processes that make them ahead, forked from this one; 0 makes each when it is needed.
    They may compute on no GPU.
    """
    if not workers:
        return map(make, steps)
    made: DataLoader[bytes] = DataLoader(
        _Made(make),
        batch_size=None,
        sampler=steps,
        collate_fn=_unchanged,
        num_workers=workers,
        prefetch_factor=_AHEAD,
        multiprocessing_context="fork",
    )
    return map(pickle.loads, made)


def _unchanged(batch: Any) -> Any:
    return batch


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Return a batch's tensor on the device, without waiting for what a GPU still computes."""
    if device.type == "cuda" and not tensor.is_cuda:
        tensor = tensor.pin_memory()
    return tensor.to(device, non_blocking=True)
