"""Count how often evicted blocks are asked for again: the measure of whether a cache is too small.

The number of evictions says nothing, because a full cache evicts all the time. A cache is too small
if prompts arrive whose blocks were evicted a while ago.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from motet_shared.text import prefixes

MOST = 1 << 17  # most keys that are kept; about 16 MB


class GhostCache:
    """Keep names (`prefixes`) of evicted blocks, newest at the end. Called between steps only."""

    def __init__(self, num_blocks: int):
        """Keep up to twice `num_blocks` names, for a cache of `num_blocks` blocks.

        So it estimates the hits of a cache of three times the size.
        """
        self.recomputed = 0  # tokens that were computed again after their blocks were evicted
        self._most = min(2 * num_blocks, MOST)
        self._gone: OrderedDict[int, None] = OrderedDict()

    def note(self, called: int, held: bool) -> None:
        """Record that a block is held again, or that the last of it is gone."""
        if held:
            self._gone.pop(called, None)
            return
        self._gone[called] = None
        if len(self._gone) > self._most:
            self._gone.popitem(last=False)

    def count(self, parent: int, names: Sequence[int], block_size: int) -> None:
        """Count tokens of `names`, computed below block `parent`, that were evicted earlier."""
        for start in range(0, len(names) - block_size + 1, block_size):
            parent = prefixes.chained(parent, names[start : start + block_size])
            if parent not in self._gone:
                return
            self.recomputed += block_size
