"""Receive the keys and values of requests whose prompts are computed by a prefill worker.

Such a request keeps its place and its cached prefix like any other, and the scheduler skips it
until all but its last token has arrived. If the transfer fails, the request continues from what has
arrived and is computed here: no other worker's failure can end it.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import Tensor

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.kv_cache import KvCache
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.engine.feature import Feature
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.request import Key, Request, Status
from motet_llm.scheduling.scheduler import Scheduler
from motet_shared.errors import BadRequest, InternalError

from .handovers import Handover, Handovers, Transfer
from .kv_transfer import DTYPES, KvPart, TransferRange, first_seen, part_bytes, unpack

log = logging.getLogger(__name__)


class KvReceiver(Feature):
    """Receive the keys and values of handed-over prompts. Called by the thread that owns the engine.

    `receive` and `end` are called between steps.
    """

    def __init__(
        self,
        kv: KvCache,
        tables: BlockTables,
        scheduler: Scheduler,
        prefix_cache: PrefixCache | None,
        handovers: Handovers,
    ):
        self._kv = kv
        self._tables = tables
        self._scheduler = scheduler
        self._prefix_cache = prefix_cache
        self._handovers = handovers
        self._arrived: list[tuple[Transfer, KvPart, Tensor, torch.dtype]] = []
        self._pieces = self._bytes = 0

    @property
    def fallbacks(self) -> Counter[str]:
        """Return how many transfers ended before their prompt was complete, by cause."""
        return self._handovers.fallbacks

    @property
    def has_news(self) -> bool:
        return bool(self._arrived or self._handovers.news)

    # -------------------------------------------------------------------------------------------------- between steps
    def receive(self, key: Key, part: KvPart, content: Tensor, dtype: str) -> None:
        """Take in a part's bytes (`uint8`).

        A part that is not the one due ends the transfer; a request that has left is no error.
        """
        transfer = self._handovers.transfers.get(key)
        if transfer is None or not transfer.is_open:
            return
        try:
            if transfer.range is None:
                transfer.range = self._begin(transfer, part)
            transfer.range.add(part)
            _check_size(self._kv, part, content, dtype)
        except BadRequest as error:
            log.warning(
                "keys and values from another worker are not what is due",
                extra={"reason": error.message},
            )
            self._handovers.news.append(Handover(key, ""))
            self.end(key, "damaged")
            return
        if part.last:
            transfer.range = None
        if transfer.is_open:  # else it was preempted while room was made
            self._arrived.append((transfer, part, content, DTYPES[dtype]))

    def _begin(self, transfer: Transfer, part: KvPart) -> TransferRange:
        """Make room for the range that begins with a part.

        Raises BadRequest if it is not the range that is due.
        """
        request = transfer.request
        ends = (earlier.stop for other, earlier, _, _ in self._arrived if other is transfer)
        due = max(ends, default=request.num_computed)
        if part.start != due or not part.start < part.stop < len(request.tokens):
            raise BadRequest(
                f"tokens {part.start} to {part.stop} came, {due} to {len(request.tokens) - 1} are due"
            )
        if self._scheduler.make_room(request, part.stop, passed=True):
            self._tables.grow(request, part.stop, passed=True)
        return TransferRange(self._kv, part.start, part.stop)

    def end(self, key: Key, cause: str) -> None:
        """End a transfer because of `cause`; what is missing of the request is prefilled here."""
        self._store_arrived()
        transfer = self._handovers.transfers.get(key)
        if transfer is not None and transfer.is_open:
            self._tables.cut(transfer.request)
            transfer.request.constraints.on_hold = False
            self._handovers.end(transfer, cause)

    # --------------------------------------------------------------------------------- while the model computes a step
    def outputs(self) -> list[StepOutput]:
        """Store the parts that have arrived, and return the handovers to announce."""
        self._store_arrived()
        transfers = self._handovers.transfers.values()
        for transfer in [t for t in transfers if not t.is_open]:
            is_alive = transfer.request.status is not Status.FINISHED
            if is_alive:
                self._handovers.news.append(Handover(transfer.request.key, ""))
            self._handovers.end(transfer, "preempted" if is_alive else "")
        news, self._handovers.news = self._handovers.news, []
        return [StepOutput(handover.key, [], handover=handover) for handover in news]

    def _store_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for transfer, part, content, dtype in arrived:
            if transfer.is_open:
                self._store(transfer, part, content, dtype)

    def _store(self, transfer: Transfer, part: KvPart, content: Tensor, dtype: torch.dtype) -> None:
        request = transfer.request
        unpack(self._kv, request.tables, part, content, dtype)
        self._pieces += 1
        self._bytes += content.nbytes
        if part.last:
            self._advance(request, part.start, part.stop)
        if request.num_uncomputed == 1:
            request.constraints.on_hold = False
            self._handovers.end(transfer, is_complete=True)

    def _advance(self, request: Request, start: int, stop: int) -> None:
        """Mark a complete range as computed, and publish it in the prefix cache.

        The first block of a sliding window may be incomplete: `whole_from` keeps it out of the
        prefix cache.
        """
        for g, group in enumerate(self._kv.groups):
            first = first_seen(self._kv, group.layers[0], start, stop)
            if first > start:
                request.blocks.whole_from[g] = first
        request.num_computed = stop
        if self._prefix_cache is not None:
            self._prefix_cache.publish(request)
        self._tables.trim(request)

    def stats(self) -> dict[str, float]:
        """Return counts of handovers and of parts, bytes and seconds of their transfers."""
        return {
            "remote_prefills": self._handovers.count,
            "kv_transfers": len(self._handovers.transfers),
            "kv_parts_received": self._pieces,
            "kv_bytes_received": self._bytes,
            "kv_transfer_seconds": self._handovers.seconds,
        }

    def check_integrity(self, requests: set[Request]) -> None:
        """Raise InternalError unless the requests on hold are those in transfer."""
        on_hold = {r.key for r in self._scheduler.running if r.constraints.on_hold}
        coming = {key for key, transfer in self._handovers.transfers.items() if transfer.is_open}
        if on_hold != coming:
            raise InternalError(
                f"{len(on_hold)} requests wait for keys and values, {len(coming)} transfers are known"
            )


def _check_size(kv: KvCache, part: KvPart, content: Tensor, dtype: str) -> None:
    if dtype not in DTYPES or content.nbytes != part_bytes(kv, part, DTYPES[dtype]):
        raise BadRequest(
            f"tokens {part.first} to {part.end} came as {content.nbytes} bytes of {dtype!r}"
        )
