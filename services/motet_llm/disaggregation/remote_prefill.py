"""Have prompts computed by prefill workers: choose one, read its stream, feed the engine.

This is the decode worker's side, on its event loop; only `choose` and `on_end` of the receiver are
called by the engine's thread. A failure ends the transfer, never the request: the engine computes
the rest itself.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch

from motet_llm.cache.offload import Speed
from motet_llm.engine.request import Key, Request
from motet_llm.engine.thread import EngineThread
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, MotetError
from motet_shared.messages import Generate, Heartbeat, KvChunk, ModelCard, Prefill, tier_of
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.stream import Stream

from .kv_receiver import Handover
from .kv_transfer import KvPart
from .placement import Delay, LocalPrefill, Policy, RemotePrefillOffer, choose

ROLE = "prefill"


class RemotePrefill:
    """Hand prompts over to prefill workers.

    patience: seconds without progress after which a prefill worker is given up. on_bug: called with
    an unexpected error; ends this process.
    """

    def __init__(
        self,
        bus: Bus,
        store: BlobStore,
        thread: EngineThread,
        cards: Sequence[ModelCard],
        policy: Policy,
        part_timeout: float,
        on_bug: Callable[[BaseException], None],
    ):
        """Initialize with `cards` of the model and then of its adapters."""
        self._bus, self._store, self._thread = bus, store, thread
        self._name = cards[0].name
        self._kv = {card.name: card.kv_format for card in cards if card.kv_format}
        self._policy, self._part_timeout, self._on_bug = policy, part_timeout, on_bug
        # By name of model or adapter; replaced as a whole, since the engine's thread reads it.
        self._workers: dict[str, tuple[Heartbeat, ...]] = {}
        self._tasks: dict[Key, asyncio.Task[None]] = {}
        self._handed_over_tokens: Counter[str] = (
            Counter()
        )  # tokens by worker; written by the engine's thread
        self._ended_tokens: Counter[str] = (
            Counter()
        )  # those whose transfer has ended; written by the loop
        self._speed = Speed()  # of reading blobs of other processes
        self._delay = Delay()
        self._expected: dict[Key, float] = {}  # seconds; used by the engine's thread
        self._token_bytes = thread.engine.receiver.token_bytes

    def start(self) -> None:
        """Begin to hand over, if the policy allows it and the KV cache can be transferred."""
        if self._policy != "never" and self._kv:
            self._bus.monitor.duties.append(self._update_workers)
            self._bus.directory.on_gone.append(self._store.forget)
            self._thread.engine.receiver.choose = self._choose
            self._thread.engine.receiver.on_end = self._note

    def stats(self) -> dict[str, Any]:
        """Return the number of prefill workers, fallbacks by cause, and the delay."""
        fallbacks = dict(self._thread.engine.receiver.fallbacks)
        return {
            "prefill_workers": len(self._workers.get(self._name, ())),
            "prefill_fallbacks": fallbacks,
            "prefill_delay": self._delay.seconds,
        }

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # --------------------------------------------------------------------------------------------------------- choosing
    async def _update_workers(self, _elapsed: float) -> None:
        """Update the ready prefill workers whose keys and values are compatible."""
        found: dict[str, list[Heartbeat]] = {}
        for beat in self._bus.directory.ready(ROLE, model=self._name):
            for card in beat.models:
                if card.kv_format and self._kv.get(card.name) == card.kv_format:
                    found.setdefault(card.name, []).append(beat)
        self._workers = {name: tuple(beats) for name, beats in found.items()}

    def _choose(self, request: Request, local: LocalPrefill) -> str | None:
        """Choose the prefill worker of a request, on the engine's thread."""
        tokens = request.num_uncomputed - 1
        name = self._name if request.adapter is None else request.adapter.name
        remote = [self._remote_load(beat, request.priority) for beat in self._workers.get(name, ())]
        transfer_token = self._speed.seconds_per_byte * self._token_bytes
        choice = choose(self._policy, tokens, local, remote, transfer_token, self._delay.seconds)
        if choice is None:
            return None
        self._handed_over_tokens[choice.instance] += tokens
        self._expected[request.key] = choice.seconds
        return choice.instance

    def _note(self, key: Key, seconds: float | None) -> None:
        """Record the end of a transfer, on the engine's thread.

        `seconds` is its duration, None if it is incomplete.
        """
        expected = self._expected.pop(key)
        if seconds is not None and not math.isnan(expected):
            self._delay.note(seconds - expected)

    def _remote_load(self, beat: Heartbeat, priority: int) -> RemotePrefillOffer:
        """Return a worker's load: its last heartbeat may not include what was handed over since."""
        ours = self._handed_over_tokens[beat.instance] - self._ended_tokens[beat.instance]
        ahead = max(beat.load.get(f"prefill_{tier_of(priority)}", 0.0), float(ours))
        return RemotePrefillOffer(beat.instance, ahead, beat.load.get("prefill_token", 0.0))

    # -------------------------------------------------------------------------------------------------------- following
    def on_handover(self, call: Call, handover: Handover) -> None:
        """Begin or stop the remote prefill of a request, as the engine says."""
        if not handover.instance:
            self.stop(call.id)
            return
        task = asyncio.get_running_loop().create_task(
            self._run_transfer(call, handover), name=f"prefill {call.id}"
        )
        self._tasks[call.id] = task
        task.add_done_callback(lambda done: self._on_task_done(call.id, handover, done))

    def stop(self, key: Key) -> None:
        """Cancel the remote prefill of a request that has left or continues locally."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    def _on_task_done(self, key: Key, handover: Handover, task: asyncio.Task[None]) -> None:
        self._ended_tokens[handover.instance] += len(handover.tokens) - handover.start
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)

    async def _run_transfer(self, call: Call, handover: Handover) -> None:
        request = cast(Generate, call.request)
        prefill = Prefill(
            model=request.model,
            prompt=list(handover.tokens),
            kv_format=self._kv[request.model],
            start=handover.start,
            request_id=request.request_id,
            priority=request.priority,
            tenant=request.tenant,
        )
        stream = self._bus.open(
            ROLE, prefill, instance=handover.instance, deadline=call.remaining(), epoch=call.epoch
        )
        cause = "incomplete"
        try:
            async with stream:
                await self._read(stream, handover)
        except TimeoutError:
            cause = "late"
        except MotetError as error:
            cause = error.code
        self._thread.end_transfer(handover.key, cause)

    async def _read(self, stream: Stream, handover: Handover) -> None:
        """Pass all parts on to the engine.

        Raises BadRequest for anything else, and TimeoutError if no part comes within the patience.
        """
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(self._part_timeout) as limit:
            async for body in stream:
                if not isinstance(body, KvChunk):
                    raise BadRequest(
                        f"{handover.instance} sent {type(body).__name__} where keys and values are due"
                    )
                began = clock()
                data = await self._store.get(body.ref)
                self._speed.note(clock() - began, body.ref.nbytes)
                part = KvPart(
                    body.start, body.stop, tuple(body.layers), body.first, body.end, body.last
                )
                content = torch.frombuffer(data, dtype=torch.uint8)
                self._thread.receive(handover.key, part, content, body.ref.dtype)
                limit.reschedule(clock() + self._part_timeout)
                if body.last and body.stop == len(handover.tokens):
                    await stream.end_input()
