"""Recognize the errors of allocations that failed, and of GPUs that are lost to the process."""

from __future__ import annotations

import torch

# How torch reports a failed allocation of a CPU; it has no type of its own.
_NO_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)


def check_device(error: BaseException) -> None:
    """Raise an error of a GPU other than missing memory: all later work of the process fails, too."""
    if isinstance(error, torch.AcceleratorError) and not is_out_of_memory(error):
        raise error
