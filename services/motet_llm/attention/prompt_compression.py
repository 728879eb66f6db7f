"""Compress prompts to their heavy hitters once they are computed.

The remaining tokens move together into new blocks. The old blocks are freed; those that the prefix
cache has published stay there, so it keeps prompts whole. Keys are stored rotated, so attention
need not know that tokens are missing; but from then on, tokens behind the prompt lie
`RequestBlocks.num_dropped` slots earlier in the block tables than their positions say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.kv_cache import KvCache
from motet_llm.engine.feature import Feature
from motet_llm.engine.model_thread import ModelThread
from motet_llm.engine.request import Request, RequestOptions
from motet_llm.scheduling.scheduler import Scheduler
from motet_llm.scheduling.work import Work

from .heavy_hitters import HeavyHitters, Watch

Rows = dict[int, list[Tensor]]  # what each layer keeps, as `KvCache.put` takes it


class PromptWatches:
    """Keep the watches over prompts: an `AdmissionPolicy` of the scheduler.

    A watched prompt is computed up to its end before anything follows, and its watched tokens are
    always computed, because their queries are needed.
    """

    def __init__(self, rule: HeavyHitters):
        self._rule = rule
        self._watches: dict[Request, Watch] = {}

    def add(self, request: Request) -> None:
        """Watch over the prompt of a new request, if it is longer than what is kept."""
        watch = self._rule.watch(request.num_prompt)
        if watch is not None:
            self._watches[request] = watch
            request.constraints.match_end = watch.start
            request.constraints.chunk_end = watch.num_prompt

    def forget(self, request: Request) -> None:
        self._watches.pop(request, None)

    def admitted(self, request: Request, scheduler: Scheduler) -> None:
        """Change nothing: a watch begins when its request is queued."""

    def released(self, request: Request) -> None:
        """Watch over the prompt again, which will be computed again."""
        if (watch := self._watches.get(request)) is not None:
            watch.clear()
            request.constraints.chunk_end = watch.num_prompt

    def active(self, works: Sequence[Work]) -> dict[Request, Watch]:
        """Return the watches over prompts of a step that are not compressed yet."""
        requests = (w.request for w in works if w.request.constraints.chunk_end is not None)
        return {r: watch for r in requests if (watch := self._watches.get(r)) is not None}


def observations(
    works: Sequence[Work], watches: Mapping[Request, Watch]
) -> list[tuple[Watch, slice]]:
    """Return the watches of a step, each with the slice of the step's tokens that it observes."""
    starts = accumulate((work.num_tokens for work in works), initial=0)
    return [
        (watch, slice(start + part.start, start + part.stop))
        for start, work in zip(starts, works, strict=False)
        if (watch := watches.get(work.request)) is not None and (part := watch.among(work.span))
    ]


class PromptCompression(Feature):
    """Compress the prompts of one engine, between steps."""

    def __init__(
        self,
        kv: KvCache,
        tables: BlockTables,
        scheduler: Scheduler,
        watches: PromptWatches,
        model_thread: ModelThread,
    ):
        self._kv, self._tables, self._scheduler = kv, tables, scheduler
        self._watches, self._model_thread = watches, model_thread
        self._prompts = self._tokens = 0

    def admit(self, request: Request, options: RequestOptions) -> None:
        self._watches.add(request)

    def forget(self, request: Request) -> None:
        self._watches.forget(request)

    def observations(self, works: Sequence[Work]) -> list[tuple[Watch, slice]]:
        """Return the watches of a step, each with the slice of tokens that it observes."""
        watches = self._watches.active(works)
        return observations(works, watches) if watches else []

    def after_step(self, works: Sequence[Work]) -> None:
        """Compress the prompts that are completely computed, on the model's thread.

        If free blocks do not suffice, because other requests share the old ones, requests of the
        lowest rank are preempted: perhaps the request itself, which then computes its prompt again.
        """
        due = {r: watch for r, watch in self._watches.active(works).items() if not r.num_due}
        if due:
            self._model_thread.call_as_owner(self._compress_all, due)

    def _compress_all(self, due: Mapping[Request, Watch]) -> None:
        for request, watch in due.items():
            if request.tables:  # else it was preempted for another one
                self._compress(request, watch)

    def _compress(self, request: Request, watch: Watch) -> None:
        rows = gather(self._kv, request, watch)
        self._tables.drop(request, watch.num_left_out)
        request.constraints.chunk_end = None
        if self._scheduler.make_room(request, request.num_computed):
            self._tables.grow(request, request.num_computed)
            store(self._kv, request, rows)
            self._prompts += 1
            self._tokens += request.blocks.num_dropped

    def stats(self) -> dict[str, float]:
        """Return how many prompts were compressed, and how many tokens they lost."""
        return {"prompts_compressed": self._prompts, "prompt_tokens_dropped": self._tokens}


@torch.inference_mode()
def gather(kv: KvCache, request: Request, watch: Watch) -> Rows:
    """Copy what a computed prompt keeps, and end its watch."""
    rows: Rows = {}
    for group, table in zip(kv.groups, request.tables, strict=True):
        if not group.is_local:
            slots_T = kv.slots(table, 0, watch.num_prompt)
            for layer in group.layers:
                rows[layer] = kv.pick(layer, slots_T[watch.heaviest(layer, kv, slots_T)].T)
    watch.clear()
    return rows


@torch.inference_mode()
def store(kv: KvCache, request: Request, rows: Rows) -> None:
    """Write what `gather` returned to the beginning of the request's tables."""
    for group, table in zip(kv.groups, request.tables, strict=True):
        if not group.is_local:
            for layer in group.layers:
                kv.put(layer, rows[layer], kv.slots(table, 0, len(rows[layer][0])))
