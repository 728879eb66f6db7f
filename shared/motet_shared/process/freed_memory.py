"""Give memory that the C library keeps after it was freed back to the operating system."""

from __future__ import annotations

import contextlib
import ctypes


def return_freed() -> None:
    """Give freed memory of the allocator back to the operating system.

    glibc keeps free memory between live allocations: after a model was loaded and warmed up, that
    is much.
    """
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)
