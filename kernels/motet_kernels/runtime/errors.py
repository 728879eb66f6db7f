"""Define the error that kernels raise on arguments, and recognize that of missing memory."""

from __future__ import annotations

import re

import torch

# The names at the beginning of a message: `bias_N: …`, `slots_N[3]: …`, `cos_NR, sin_NR: …`.
_NAMED = re.compile(r"(\w[\w.]*(?:\[[\d, ]+\])?)(?:, [\w.]+)*[:=]")

# How torch reports a failed allocation of a CPU; it has no type of its own.
_NO_MEMORY = ("DefaultCPUAllocator", "Cannot allocate memory")


class KernelError(ValueError):
    """Report an argument that a kernel cannot take: its name, what it is and what it must be.

    param: the argument that the message begins with, the first of several; None without one.
    """

    def __init__(self, message: str):
        super().__init__(message)
        named = _NAMED.match(message)
        self.param = named[1] if named else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return True if an allocation failed, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(text in str(error) for text in _NO_MEMORY)
