"""Recognize the errors of allocations that failed."""

from __future__ import annotations

import torch

# How torch reports a failed allocation of a CPU; it has no type of its own.
_NO_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory")


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
