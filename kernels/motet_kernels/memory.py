"""Memory on huge pages, for what a step reads much of: packed weights, and caches of keys and values.

A page of 4 KB costs a walk through the page tables whenever reading enters it, in a virtual machine a walk through two
sets of them. Weights that stream by hardly notice; attention, which jumps from block to block of a long context, ran
15 % faster on pages of 2 MB. Linux gives them on request (`madvise`) where its setting `transparent_hugepage` is
`madvise` or `always`; elsewhere the memory is as any other.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import mmap
import threading

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 64 << 20

_lock = threading.Lock()
_chunk: tuple[mmap.mmap, int] | None = None  # the one that is being filled, and its first free byte


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A dense tensor of zeros on the CPU that begins at a multiple of 64 bytes, with a storage of its own size.

    Small tensors share chunks of 64 MB; a chunk is given back when the last tensor in it goes.
    """
    global _chunk
    count = math.prod(shape)
    nbytes = count * dtype.itemsize
    if count == 0:
        return torch.zeros(shape, dtype=dtype)
    if nbytes > CHUNK // 2:
        pages, start = _map(nbytes)
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=start).view(shape)
    with _lock:
        if _chunk is None or _chunk[1] + nbytes > len(_chunk[0]):
            _chunk = _map(CHUNK)
        pages, start = _chunk
        _chunk = pages, start + -(-nbytes // 64) * 64
        return torch.frombuffer(pages, dtype=dtype, count=count, offset=start).view(shape)


def return_freed() -> None:
    """Give freed memory back to the system. glibc keeps what lies between live allocations: after a load, much."""
    with contextlib.suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def _map(nbytes: int) -> tuple[mmap.mmap, int]:
    """New pages, and where the first huge one of them begins."""
    # Private: shared memory, the default, has a setting of its own for huge pages, which is mostly off.
    pages = mmap.mmap(-1, (-(-nbytes // HUGE) + 1) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without them
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE
