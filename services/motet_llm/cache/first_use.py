"""Take memory of a KV cache from the operating system before blocks in it are used.

Linux provides memory at its first write, and clears it: a huge page of every layer when a request
gets the first block in it. All streams wait meanwhile, and a prompt that is written to new memory
takes twice as long. An idle engine therefore takes the memory of the next blocks, a page at a time.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator, Sequence

from torch import Tensor

from motet_kernels.runtime.memory import HUGE

TOKENS_AHEAD = 4096  # whose memory an idle engine takes before requests need it
_MADV_POPULATE_WRITE = 23  # madvise(2), since Linux 5.14; contents stay as they are


class FirstUse:
    """Take the memory of blocks in their order.

    storages: of each layer, `[P, X]`: X bytes of P blocks, in a CPU's memory.
    """

    def __init__(self, storages: Sequence[Tensor]):
        self._storages = storages
        self._pages = self._list_pages()
        self._next = next(self._pages, None)

    def take_page(self, blocks: int) -> bool:
        """Take one page more, if it has some of the first `blocks`; return True if it did.

        Where the operating system cannot, memory is taken at its first write.
        """
        if self._next is None or self._next[0] >= blocks:
            return False
        _, address, nbytes = self._next
        self._next = next(self._pages, None) if _populate(address, nbytes) else None
        return True

    def _list_pages(self) -> Iterator[tuple[int, int, int]]:
        """Yield the first block of each page, its address and its bytes, by blocks."""
        pages = [
            (
                offset // storage.stride(0),
                storage.data_ptr() + offset,
                min(HUGE, storage.nbytes - offset),
            )
            for storage in self._storages
            for offset in range(0, storage.nbytes, HUGE)
        ]
        yield from sorted(pages)


def _populate(address: int, nbytes: int) -> bool:
    """Have the operating system provide memory; return False if it cannot."""
    begin = address // mmap.PAGESIZE * mmap.PAGESIZE
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    return bool(madvise(begin, address + nbytes - begin, _MADV_POPULATE_WRITE) == 0)
