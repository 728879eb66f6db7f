"""Choose prefill workers by their heartbeats and by how long earlier transfers took.

The event loop writes what is known of the workers, and the engine's thread reads it when it admits
a request.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

from motet_llm.cache.offload import CopySpeed
from motet_llm.engine.request import Key, Request
from motet_shared.messages import Heartbeat, tier_of

from .kv_transfer import adapted
from .placement import Delay, LocalPrefill, Policy, RemotePrefillOffer, choose


class RemotePlacement:
    """Choose the engine that computes a prompt of `model` or of its adapters.

    workers: ready prefill workers by the name and the KV format of a model or adapter; replaced as a
        whole by the loop.
    kv_format: of the model itself.
    speed: speed of reading blobs of other processes; written by the loop.
    """

    def __init__(self, model: str, policy: Policy):
        self.policy = policy
        self.workers: Mapping[tuple[str, str], tuple[Heartbeat, ...]] = {}
        self.kv_format = ""
        self.speed = CopySpeed()
        # Sites that may compute the prompt, by request; those without an entry are not limited. Written
        # by the loop before it submits a request, and until that has ended.
        self.sites: dict[Key, tuple[str, ...]] = {}
        self._model = model
        self._given: Counter[str] = Counter()  # tokens by worker; written by the engine's thread
        self._back: Counter[str] = Counter()  # those whose transfer has ended; written by the loop
        self._delay = Delay()
        self._expected: dict[Key, float] = {}  # seconds; used by the engine's thread

    @property
    def num_workers(self) -> int:
        """Return the number of ready workers for the model itself."""
        return len(self.workers.get((self._model, self.kv_format), ()))

    @property
    def delay(self) -> float:
        """Return the seconds that a handover takes beyond computing and sending."""
        return self._delay.seconds

    def choose(self, request: Request, here: LocalPrefill, token_bytes: int) -> str | None:
        """Return the prefill worker that computes a prompt, or None for this engine."""
        tokens = request.num_uncomputed - 1
        kind = self._model, self.kv_format
        if request.adapter is not None:  # the one that the request holds: it may be replaced by now
            kind = request.adapter.name, adapted(self.kv_format, request.adapter.digest)
        allowed = self.sites.get(request.key)
        there = [
            self._offer(beat, request.priority)
            for beat in self.workers.get(kind, ())
            if allowed is None or beat.site in allowed
        ]
        transfer_token = self.speed.seconds_per_byte * token_bytes
        choice = choose(self.policy, tokens, here, there, transfer_token, self.delay)
        if choice is None:
            return None
        self._given[choice.instance] += tokens
        self._expected[request.key] = choice.seconds
        return choice.instance

    def ended(self, key: Key, seconds: float | None) -> None:
        """Record the end of a transfer: its duration, or None if it is incomplete."""
        expected = self._expected.pop(key)
        if seconds is not None and not math.isnan(expected):
            self._delay.note(seconds - expected)

    def take_back(self, instance: str, tokens: int) -> None:
        """Record that a worker no longer computes `tokens` tokens for this engine."""
        self._back[instance] += tokens

    def _offer(self, beat: Heartbeat, priority: int) -> RemotePrefillOffer:
        """Return a worker's load: its heartbeat's, or the tokens handed over to it if more."""
        ours = self._given[beat.instance] - self._back[beat.instance]
        ahead = max(beat.load.get(f"prefill_{tier_of(priority)}", 0.0), float(ours))
        return RemotePrefillOffer(beat.instance, ahead, beat.load.get("prefill_token", 0.0))
