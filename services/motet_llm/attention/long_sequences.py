"""End sequences longer than the pool whose spilled blocks cannot be written or read back."""

from __future__ import annotations

from collections.abc import Iterable

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.kv_cache import KvCache
from motet_llm.cache.spill import Spill
from motet_llm.engine.feature import Feature
from motet_llm.engine.request import Request
from motet_shared.errors import InternalError, MotetError


class LongSequences(Feature):
    """Watch over the sequences that are spilled."""

    def __init__(self, kv: KvCache, tables: BlockTables, spill: Spill):
        self._kv, self._tables, self._spill = kv, tables, spill

    def failed(self, requests: Iterable[Request]) -> dict[Request, MotetError]:
        """Return the requests that have lost blocks, and scrub what was computed without them."""
        lost: dict[Request, MotetError] = {}
        for request in requests:
            spilled = request.blocks.spilled
            if spilled is not None and spilled.failure is not None:
                # Computed with those blocks missing: the result is arbitrary and may contain NaN.
                self._kv.scrub(self._tables.private_blocks(request))
                lost[request] = InternalError(
                    f"the sequence is longer than the KV cache, and {spilled.failure}; "
                    f"it ends after {request.num_output} output tokens"
                )
        return lost

    def stats(self) -> dict[str, float]:
        return self._spill.stats()
