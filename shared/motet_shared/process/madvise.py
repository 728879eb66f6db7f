"""Advise Linux about memory of this process at any address: madvise(2)."""

from __future__ import annotations

import ctypes

DONT_NEED = 4  # drop the pages: those of files are mapped again when they are read
POPULATE_WRITE = 23  # provide the pages now, contents as they are; since Linux 5.14


def advise(address: int, nbytes: int, advice: int) -> bool:
    """Give advice about memory that begins with a page; return False if Linux does not take it."""
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(madvise(address, nbytes, advice) == 0)
