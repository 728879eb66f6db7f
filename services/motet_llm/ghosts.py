"""What a prefix cache has lost, and how often somebody asks for it again: whether the cache is too small.

That blocks are evicted says nothing: a full cache evicts all the time. It is too small if prompts come whose blocks
were there a while ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from motet_shared import prefixes

MOST = 1 << 17  # blocks that are remembered at most; about 16 MB


class Ghosts:
    """Names of blocks that are gone (`prefixes`), the newest at the end. Called between steps only."""

    def __init__(self, num_blocks: int):
        """`num_blocks`: of the cache. It remembers twice as many: what a cache of three times its size would hold."""
        self.recomputed = 0  # tokens that were asked for after they were lost
        self._most = min(2 * num_blocks, MOST)
        self._gone: OrderedDict[int, None] = OrderedDict()

    def note(self, called: int, held: bool) -> None:
        """A block has come (back), or the last of it has gone."""
        if held:
            self._gone.pop(called, None)
            return
        self._gone[called] = None
        if len(self._gone) > self._most:
            self._gone.popitem(last=False)

    def count(self, parent: int, names: Sequence[int], block_size: int) -> None:
        """Somebody computes the tokens `names`, which come after the block called `parent`."""
        for start in range(0, len(names) - block_size + 1, block_size):
            parent = prefixes.chained(parent, names[start : start + block_size])
            if parent not in self._gone:
                return
            self.recomputed += block_size
