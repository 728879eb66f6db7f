"""Allocate memory on huge pages for data that steps read heavily: packed weights and KV caches.

With pages of 4 KB, reading costs a walk through the page tables at every new page, in a virtual
machine a walk through two sets of them. Weights, which are read sequentially, hardly suffer;
attention, which jumps between the blocks of a long context, ran 15 % faster on pages of 2 MB. Linux
provides them on request (`madvise`) where its setting `transparent_hugepage` is `madvise` or
`always`; elsewhere the memory is on ordinary pages.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import threading

import torch
from torch import Tensor

HUGE = 2 << 20
CHUNK = 64 << 20

_lock = threading.Lock()
_chunk: tuple[mmap.mmap, int] | None = None  # the chunk being filled, and its first free byte


def huge_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a dense CPU tensor of zeros, aligned to 64 bytes.

    Its storage has exactly the tensor's size. Small tensors share chunks of 64 MB; a chunk is freed
    with the last tensor in it.
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


def _map(nbytes: int) -> tuple[mmap.mmap, int]:
    """Map new pages; return them and the offset of the first huge page."""
    # Private: shared memory, the default, has its own setting for huge pages, which is mostly off.
    pages = mmap.mmap(
        -1, (-(-nbytes // HUGE) + 1) * HUGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a Linux kernel without huge pages
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages, -torch.frombuffer(pages, dtype=torch.uint8).data_ptr() % HUGE
