"""What the kernels refuse."""

from __future__ import annotations


class KernelError(ValueError):
    """An argument that a kernel cannot take. The message names the argument, what it is and what it must be."""
