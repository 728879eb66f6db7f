"""Define the error that kernels raise on arguments."""

from __future__ import annotations

import re

# The names at the beginning of a message: `bias_N: …`, `slots_N[3]: …`, `cos_NR, sin_NR: …`.
_NAMED = re.compile(r"(\w[\w.]*(?:\[[\d, ]+\])?)(?:, [\w.]+)*[:=]")


class KernelError(ValueError):
    """Report an argument that a kernel cannot take: its name, what it is and what it must be.

    param: the argument that the message begins with, the first of several; None without one.
    """

    def __init__(self, message: str):
        super().__init__(message)
        named = _NAMED.match(message)
        self.param = named[1] if named else None
