"""Cuts prompts down to their heavy hitters, once they are computed: what stays moves together into blocks of its own.

The old blocks go back, to the prefix cache if it knows them: it keeps prompts whole. Keys have their positions turned
in, so attention need not know that something is missing; but from then on what lies behind the prompt lies
`Request.left_out` places earlier in its block tables than its positions say.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from .block_tables import BlockTables
from .heavy_hitters import Watch
from .kv_cache import KvCache
from .request import Request, Status
from .scheduler import Scheduler

Rows = dict[int, list[Tensor]]  # what stays of each layer, as `KvCache.put` takes it


class PromptCutter:
    """Of one engine. Called between steps, where the model computes."""

    def __init__(self, kv: KvCache, tables: BlockTables, scheduler: Scheduler):
        self._kv, self._tables, self._scheduler = kv, tables, scheduler
        self._prompts = self._tokens = 0

    def cut(self, requests: Iterable[Request]) -> None:
        """Cut those whose prompts are `due` now. If there is no room beside blocks that others hold too, those of the
        lowest rank give way: perhaps the request itself, which then computes its prompt again."""
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
        """Prompts that were cut down, and the tokens that they lost."""
        return {"prompts_cut": self._prompts, "tokens_left_out": self._tokens}


@torch.inference_mode()
def gather(kv: KvCache, request: Request, watch: Watch) -> Rows:
    """A copy of what stays of a prompt that is computed, and the end of its watch."""
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
    """What `gather` gave, at the beginning of the request's tables."""
    for group, table in zip(kv.groups, request.tables, strict=True):
        if group.window is None:
            for layer in group.layers:
                kv.put(layer, rows[layer], kv.slots(table, 0, len(rows[layer][0])))
