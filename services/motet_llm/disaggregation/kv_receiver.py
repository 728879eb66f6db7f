"""Receive the keys and values of requests whose prompts are computed by a prefill worker.

Such a request keeps its place and its cached prefix like any other, and the scheduler skips it
until all but its last token has arrived. If the transfer fails, the request continues from what has
arrived and is computed here: no other worker's failure can end it.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from motet_llm.cache.block_tables import BlockTables
from motet_llm.cache.kv_cache import KvCache
from motet_llm.cache.prefix_cache import PrefixCache
from motet_llm.engine.request import Key, Request, Status
from motet_llm.scheduling.scheduler import Scheduler
from motet_shared.errors import BadRequest, InternalError

from .kv_transfer import DTYPES, KvPart, Range, first_seen, part_bytes, token_bytes, unpack
from .placement import LocalPrefill

log = logging.getLogger(__name__)

Choose = Callable[[Request, LocalPrefill], str | None]
OnEnd = Callable[[Key, float | None], None]


@dataclass(frozen=True, slots=True)
class Handover:
    """Tell a prefill worker to compute all of `tokens` from `start` on.

    An empty `instance` ends the handover: no worker computes the prompt any more.
    """

    key: Key
    instance: str
    tokens: tuple[int, ...] = ()
    start: int = 0


@dataclass(slots=True, eq=False)
class Transfer:
    """A request that is being received. range: the one that is arriving now."""

    request: Request
    began: float
    range: Range | None = None


class KvReceiver:
    """Receive keys and values for one engine. Called by the thread that steps it.

    choose: selects the prefill worker of a request, or None for this engine; None disables
    handovers. on_end: called at the end of every transfer with its duration in seconds, or None if
    it is incomplete.
    """

    def __init__(
        self,
        kv: KvCache,
        tables: BlockTables,
        scheduler: Scheduler,
        prefix_cache: PrefixCache | None,
    ):
        self.choose: Choose | None = None
        self.on_end: OnEnd | None = None
        self.fallbacks: Counter[str] = Counter()
        self._kv, self._tables, self._scheduler, self._prefix_cache = (
            kv,
            tables,
            scheduler,
            prefix_cache,
        )
        self._transfers: dict[Key, Transfer] = {}
        self._arrived: list[tuple[Transfer, KvPart, Tensor, torch.dtype]] = []
        self._pending_handovers: list[Handover] = []
        self._handovers = self._pieces = self._bytes = 0
        self._seconds = 0.0
        scheduler.hand_over = self._offer

    @property
    def token_bytes(self) -> int:
        """Return the bytes per token that a transfer sends, approximately."""
        return sum(token_bytes(self._kv, layer) for layer in self._kv.group_of)

    @property
    def has_pending(self) -> bool:
        """Return True if `settle` has anything to do."""
        return bool(self._arrived or self._pending_handovers)

    def _offer(self, request: Request) -> bool:
        """Return True if the prompt is prefilled remotely; called once, at admission."""
        if (
            self.choose is None
            or request.was_handed_over
            or request.sent >= 0
            or request.images is not None
        ):
            return False
        instance = self.choose(request, self._local_load(request))
        if instance is None:
            return False
        request.was_handed_over = request.receiving = True
        self._transfers[request.key] = Transfer(request, time.monotonic())
        self._pending_handovers.append(
            Handover(request.key, instance, tuple(request.tokens[:-1]), request.num_computed)
        )
        self._handovers += 1
        return True

    def _local_load(self, request: Request) -> LocalPrefill:
        others = [r for r in self._scheduler.running if r is not request and not r.is_idle]
        ahead = sum(r.num_uncomputed for r in others if r.num_uncomputed > 1)
        streams = sum(r.num_uncomputed == 1 for r in others)
        scheduler = self._scheduler
        return LocalPrefill(
            ahead, scheduler.pace.prefill_token, streams, scheduler.limits.decode_slowdown
        )

    # -------------------------------------------------------------------------------------------------- between steps
    def receive(self, key: Key, part: KvPart, content: Tensor, dtype: str) -> None:
        """Take in a part's bytes (`uint8`).

        A part that is not the one due ends the transfer; a request that has left is no error.
        """
        transfer = self._transfers.get(key)
        if transfer is None or not transfer.request.receiving:
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
            self._pending_handovers.append(Handover(key, ""))
            self.end(key, "damaged")
            return
        if part.last:
            transfer.range = None
        if transfer.request.receiving:  # else it was preempted while room was made
            self._arrived.append((transfer, part, content, DTYPES[dtype]))

    def _begin(self, transfer: Transfer, part: KvPart) -> Range:
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
        return Range(self._kv, part.start, part.stop)

    def end(self, key: Key, cause: str) -> None:
        """End a transfer because of `cause`; what is missing of the request is prefilled here."""
        self._store_arrived()
        transfer = self._transfers.get(key)
        if transfer is not None and transfer.request.receiving:
            self._tables.cut(transfer.request)
            transfer.request.receiving = False
            self._forget(transfer, cause)

    # --------------------------------------------------------------------------------- while the model computes a step
    def settle(self) -> list[Handover]:
        """Store the parts that have arrived; return the handovers to announce."""
        self._store_arrived()
        for transfer in [t for t in self._transfers.values() if not t.request.receiving]:
            is_alive = transfer.request.status is not Status.FINISHED
            if is_alive:
                self._pending_handovers.append(Handover(transfer.request.key, ""))
            self._forget(transfer, "preempted" if is_alive else "")
        handovers, self._pending_handovers = self._pending_handovers, []
        return handovers

    def _store_arrived(self) -> None:
        arrived, self._arrived = self._arrived, []
        for transfer, part, content, dtype in arrived:
            if transfer.request.receiving:
                self._store(transfer, part, content, dtype)

    def _store(self, transfer: Transfer, part: KvPart, content: Tensor, dtype: torch.dtype) -> None:
        request = transfer.request
        unpack(self._kv, request.tables, part, content, dtype)
        self._pieces += 1
        self._bytes += content.nbytes
        if part.last:
            self._advance(request, part.start, part.stop)
        if request.num_uncomputed == 1:
            request.receiving = False
            self._forget(transfer, is_complete=True)

    def _advance(self, request: Request, start: int, stop: int) -> None:
        """Mark a complete range as computed, and publish it in the prefix cache.

        The first block of a sliding window may be incomplete: `whole_from` keeps it out of the
        prefix cache.
        """
        for g, group in enumerate(self._kv.groups):
            first = first_seen(self._kv, group.layers[0], start, stop)
            if first > start:
                request.whole_from[g] = first
        request.num_computed = stop
        if self._prefix_cache is not None:
            self._prefix_cache.publish(request)
        self._tables.trim(request)

    def _forget(self, transfer: Transfer, cause: str = "", is_complete: bool = False) -> None:
        del self._transfers[transfer.request.key]
        seconds = time.monotonic() - transfer.began
        transfer.request.transfer_seconds += seconds
        self._seconds += seconds
        if cause:
            self.fallbacks[cause] += 1
        if self.on_end is not None:
            self.on_end(transfer.request.key, seconds if is_complete else None)

    def stats(self) -> dict[str, float]:
        """Return counts of handovers and of parts, bytes and seconds of their transfers."""
        return {
            "remote_prefills": self._handovers,
            "kv_transfers": len(self._transfers),
            "kv_parts_received": self._pieces,
            "kv_bytes_received": self._bytes,
            "kv_transfer_seconds": self._seconds,
        }

    def check_integrity(self) -> None:
        """Raise InternalError unless the requests that wait for transfers are those in transfer."""
        waiting = {r.key for r in self._scheduler.running if r.receiving}
        in_transfer = {
            key for key, transfer in self._transfers.items() if transfer.request.receiving
        }
        if waiting != in_transfer:
            raise InternalError(
                f"{len(waiting)} requests wait for keys and values, {len(in_transfer)} transfers are known"
            )


def _check_size(kv: KvCache, part: KvPart, content: Tensor, dtype: str) -> None:
    if dtype not in DTYPES or content.nbytes != part_bytes(kv, part, DTYPES[dtype]):
        raise BadRequest(
            f"tokens {part.first} to {part.end} came as {content.nbytes} bytes of {dtype!r}"
        )
