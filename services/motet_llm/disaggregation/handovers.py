"""Hand prompts over to prefill workers at admission, and keep the state of their transfers."""

from __future__ import annotations

import time
from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from motet_llm.cache.kv_cache import KvCache
from motet_llm.engine.request import Key, Request
from motet_llm.scheduling.scheduler import Scheduler

from .kv_transfer import TransferRange, token_bytes
from .placement import LocalPrefill


class Placement(Protocol):
    """Choose the engine that computes a prompt.

    Called by the engine's thread.
    """

    def choose(self, request: Request, here: LocalPrefill, token_bytes: int) -> str | None:
        """Return the prefill worker that computes a prompt, or None for this engine.

        token_bytes: bytes per token that a transfer sends, approximately.
        """

    def ended(self, key: Key, seconds: float | None) -> None:
        """Record the end of a transfer: its duration, or None if it is incomplete."""


@dataclass(frozen=True, slots=True)
class Handover:
    """Request that a prefill worker computes all of `tokens` from `start` on.

    digest: of the adapter that the request holds.
    An empty `instance` ends the handover: no worker computes the prompt any more.
    """

    key: Key
    instance: str
    tokens: tuple[int, ...] = ()
    start: int = 0
    digest: str = ""


@dataclass(slots=True, eq=False)
class Transfer:
    """Track a request that is being received.

    range: the one that is arriving now.
    """

    request: Request
    began: float
    range: TransferRange | None = None

    @property
    def is_open(self) -> bool:
        """Return True while the request waits for keys and values."""
        return self.request.constraints.on_hold


class Handovers:
    """Decide at admission who computes a prompt: an `AdmissionPolicy` of the scheduler.

    A request that was handed over is on hold until its keys and values are here; if it is preempted
    meanwhile, its transfer ends.

    placement: None: this engine computes all prompts.
    """

    def __init__(self, kv: KvCache, placement: Placement | None = None):
        self.transfers: dict[Key, Transfer] = {}
        self.news: list[Handover] = []
        self.fallbacks: Counter[str] = Counter()
        self.count = 0
        self.seconds = 0.0
        self._placement = placement
        self._token_bytes = sum(token_bytes(kv, layer) for layer in kv.group_of)

    def admitted(self, request: Request, scheduler: Scheduler) -> None:
        """Put a request on hold if a prefill worker computes its prompt; at most once for each."""
        if (
            self._placement is None
            or request.times.transfer_seconds is not None
            or request.constraints.prefill_only
            or request.images is not None
            or request.constraints.match_end == 0
        ):
            return
        instance = self._placement.choose(
            request, _local_prefill(request, scheduler), self._token_bytes
        )
        if instance is None:
            return
        request.constraints.on_hold = True
        request.times.transfer_seconds = 0.0
        self.transfers[request.key] = Transfer(request, time.monotonic())
        tokens = tuple(request.tokens[:-1])
        digest = "" if request.adapter is None else request.adapter.digest
        self.news.append(Handover(request.key, instance, tokens, request.num_computed, digest))
        self.count += 1

    def released(self, request: Request) -> None:
        """Take a request off hold: its blocks, and what has arrived in them, are gone."""
        request.constraints.on_hold = False

    def end(self, transfer: Transfer, cause: str = "", is_complete: bool = False) -> None:
        """End a transfer; `cause`: why the rest of the prompt is computed here."""
        del self.transfers[transfer.request.key]
        seconds = time.monotonic() - transfer.began
        times = transfer.request.times
        times.transfer_seconds = (times.transfer_seconds or 0.0) + seconds
        self.seconds += seconds
        if cause:
            self.fallbacks[cause] += 1
        if self._placement is not None:
            self._placement.ended(transfer.request.key, seconds if is_complete else None)


def _local_prefill(request: Request, scheduler: Scheduler) -> LocalPrefill:
    others = [r for r in scheduler.running if r is not request and not r.is_idle]
    ahead = sum(r.num_uncomputed for r in others if r.num_uncomputed > 1)
    streams = sum(r.num_uncomputed == 1 for r in others)
    return LocalPrefill(
        ahead, scheduler.pace.prefill_token, streams, scheduler.limits.decode_slowdown
    )
