"""Compress prompts to their heavy hitters once they are computed.

The remaining tokens move together into new blocks. The old blocks are freed; those that the prefix
cache has published stay there, so it keeps prompts whole. Keys are stored rotated, so attention
need not know that tokens are missing; but from then on, tokens behind the prompt lie
`Request.left_out` slots earlier in the block tables than their positions say.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.kv_cache import KvCache
from motet_llm.engine.request import Request, Status
from motet_llm.scheduling.scheduler import Scheduler

from .heavy_hitters import Watch

Rows = dict[int, list[Tensor]]  # what each layer keeps, as `KvCache.put` takes it


class PromptCutter:
    """Compress prompts of one engine. Called between steps, on the thread that computes them."""

    def __init__(self, kv: KvCache, tables: BlockTables, scheduler: Scheduler):
        self._kv, self._tables, self._scheduler = kv, tables, scheduler
        self._prompts = self._tokens = 0

    def cut(self, requests: Iterable[Request]) -> None:
        """Compress prompts that are completely computed.

        If free blocks do not suffice, because other requests share the old ones, requests of the
        lowest rank are preempted: perhaps the request itself, which then computes its prompt again.
        """
        for request in requests:
            if request.status is Status.RUNNING and (watch := request.watching) is not None:
                self._cut(request, watch)

    def _cut(self, request: Request, watch: Watch) -> None:
        rows = gather(self._kv, request, watch)
        self._tables.leave_out(request, watch.num_left_out)
        if self._scheduler.make_room(request, request.num_computed):
            self._tables.grow(request, request.num_computed)
            store(self._kv, request, rows)
            self._prompts += 1
            self._tokens += request.left_out

    def stats(self) -> dict[str, float]:
        """Return how many prompts were compressed, and how many tokens they lost."""
        return {"prompts_compressed": self._prompts, "prompt_tokens_dropped": self._tokens}


@torch.inference_mode()
def gather(kv: KvCache, request: Request, watch: Watch) -> Rows:
    """Copy what a computed prompt keeps, and end its watch."""
    rows: Rows = {}
    for group, table in zip(kv.groups, request.tables, strict=True):
        if group.window is None:
            slots_T = kv.slots(table, 0, watch.num_prompt)
            for layer in group.layers:
                rows[layer] = kv.pick(layer, slots_T[watch.heaviest(layer, kv, slots_T)].T)
    watch.clear()
    return rows


@torch.inference_mode()
def store(kv: KvCache, request: Request, rows: Rows) -> None:
    """Write what `gather` returned to the beginning of the request's tables."""
    for group, table in zip(kv.groups, request.tables, strict=True):
        if group.window is None:
            for layer in group.layers:
                kv.put(layer, rows[layer], kv.slots(table, 0, len(rows[layer][0])))
