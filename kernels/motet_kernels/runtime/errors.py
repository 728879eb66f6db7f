"""Define the error that kernels raise on arguments."""

from __future__ import annotations


class KernelError(ValueError):
    """Report an argument that a kernel cannot take: its name, what it is and what it must be."""
