"""Take memory of a KV cache from the operating system before blocks in it are used.

Linux provides memory at its first write, and clears it: a huge page of every layer when a request
gets the first block in it. All streams wait meanwhile, and a prompt that is written to new memory
takes twice as long. An engine therefore takes the memory of the next blocks, a page at a time: all
of them while it is idle, and one in each step, while the model computes.
"""

from __future__ import annotations

import mmap
from collections import deque
from collections.abc import Sequence

from torch import Tensor

from motet_kernels.runtime.memory import HUGE
from motet_shared.process.madvise import POPULATE_WRITE, advise

TOKENS_AHEAD = 4096  # whose memory an engine takes before requests need it


class FirstUse:
    """Take the memory of blocks in their order.

    storages: of each layer, `[P, X]`: X bytes of P blocks, in a CPU's memory.
    """

    def __init__(self, storages: Sequence[Tensor]):
        # The first block of each page, its address and its bytes, by blocks.
        self._pages = deque(
            sorted(
                (
                    offset // storage.stride(0),
                    storage.data_ptr() + offset,
                    min(HUGE, storage.nbytes - offset),
                )
                for storage in storages
                for offset in range(0, storage.nbytes, HUGE)
            )
        )

    def take_page(self, blocks: int) -> bool:
        """Take one page more, if it has some of the first `blocks`; return True if it did.

        Where the operating system cannot, memory is taken at its first write.
        """
        if not self._pages or self._pages[0][0] >= blocks:
            return False
        _, address, nbytes = self._pages.popleft()
        before = address % mmap.PAGESIZE  # bytes of the same page: small storages begin anywhere
        if not advise(address - before, before + nbytes, POPULATE_WRITE):
            self._pages.clear()
            return False
        return True
