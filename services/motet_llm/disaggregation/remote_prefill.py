"""Have prompts computed by prefill workers: choose one, read its stream, feed the engine.

This is the decode worker's side, on its event loop. The engine's thread chooses the workers, by
`RemotePlacement`. A failure ends the transfer, never the request: the engine computes the rest
itself.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, cast

import torch

from motet_llm.engine.request import Key
from motet_llm.engine.thread import EngineThread
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest, MotetError
from motet_shared.messages import Generate, Heartbeat, KvChunk, ModelCard, Prefill
from motet_shared.wire import sites
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call
from motet_shared.wire.stream import Stream

from .handovers import Handover
from .kv_transfer import KvPart, adapted
from .remote_placement import RemotePlacement

ROLE = "prefill"


class RemotePrefill:
    """Follow the transfers of prompts that were handed over to prefill workers.

    patience: seconds without progress after which a prefill worker is given up. on_bug: called with
    an unexpected error; ends this process.
    """

    def __init__(
        self,
        bus: Bus,
        store: BlobStore,
        thread: EngineThread,
        placement: RemotePlacement,
        model: ModelCard,
        patience: float,
        on_bug: Callable[[BaseException], None],
    ):
        self._bus, self._store, self._thread = bus, store, thread
        self._placement = placement
        self._name = model.name
        placement.kv_format = model.kv_format
        self._patience, self._on_bug = patience, on_bug
        self._tasks: dict[Key, asyncio.Task[None]] = {}

    def start(self) -> None:
        """Look for workers, if the policy allows handovers and the KV cache can be transferred."""
        if self._placement.policy != "never" and self._placement.kv_format:
            self._bus.monitor.duties.append(self._find_workers)

    def stats(self) -> dict[str, Any]:
        """Return the number of prefill workers, fallbacks by cause, and the delay."""
        return {
            "prefill_workers": self._placement.num_workers,
            "prefill_fallbacks": dict(self._thread.engine.receiver.fallbacks),
            "prefill_delay": self._placement.delay,
        }

    async def close(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _find_workers(self, _elapsed: float) -> None:
        """Update the ready prefill workers."""
        found: dict[tuple[str, str], list[Heartbeat]] = {}
        for beat in self._bus.directory.ready(ROLE, model=self._name):
            for card in beat.models:
                if card.kv_format:
                    found.setdefault((card.name, card.kv_format), []).append(beat)
        near = self._bus.directory.preferred
        self._placement.workers = {kind: tuple(near(beats)) for kind, beats in found.items()}

    # -------------------------------------------------------------------------------------------------------- following
    def limit(self, call: Call) -> None:
        """Have the prompt of a call computed at its sites alone; before the engine gets its request."""
        if call.sites:
            self._placement.sites[call.id] = call.sites

    def on_handover(self, call: Call, handover: Handover) -> None:
        """Begin or stop the remote prefill of a request, as the engine says."""
        if not handover.instance:
            self.stop(call.id)
            return
        with sites.only(call.sites):  # the engine's outputs come outside the call's own task
            task = asyncio.get_running_loop().create_task(
                self._follow(call, handover), name=f"prefill {call.id}"
            )
        self._tasks[call.id] = task
        task.add_done_callback(lambda done: self._ended(call.id, handover, done))

    def drop(self, handover: Handover) -> None:
        """Ignore what the engine says of a request that has left."""
        if handover.instance:
            self._take_back(handover)

    def _take_back(self, handover: Handover) -> None:
        self._placement.take_back(handover.instance, len(handover.tokens) - handover.start)

    def stop(self, key: Key) -> None:
        """Cancel the remote prefill of a request that has left or continues locally."""
        task = self._tasks.get(key)
        if task is not None:
            task.cancel()

    def forget(self, key: Key) -> None:
        """Cancel the remote prefill of a request that has left, and forget its sites."""
        self.stop(key)
        self._placement.sites.pop(key, None)

    def _ended(self, key: Key, handover: Handover, task: asyncio.Task[None]) -> None:
        self._take_back(handover)
        self._tasks.pop(key, None)
        if not task.cancelled() and (error := task.exception()) is not None:
            self._on_bug(error)

    async def _follow(self, call: Call, handover: Handover) -> None:
        request, kv_format = cast(Generate, call.request), self._placement.kv_format
        prefill = Prefill(
            model=request.model,
            prompt=list(handover.tokens),
            kv_format=adapted(kv_format, handover.digest) if handover.digest else kv_format,
            start=handover.start,
            request_id=request.request_id,
            priority=request.priority,
            tenant=request.tenant,
        )
        cause = "incomplete"
        try:
            stream = self._bus.open(
                ROLE,
                prefill,
                instance=handover.instance,
                deadline=call.remaining(),
                epoch=call.epoch,
            )
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
        async with asyncio.timeout(self._patience) as limit:
            async for body in stream:
                if not isinstance(body, KvChunk):
                    raise BadRequest(
                        f"{handover.instance} sent {type(body).__name__} where keys and values are due"
                    )
                began = clock()
                if not body.ref.nbytes:
                    raise BadRequest(f"{handover.instance} sent a part without bytes")
                data = await self._store.get(body.ref)
                self._placement.speed.note(clock() - began, body.ref.nbytes)
                part = KvPart(
                    body.start, body.stop, tuple(body.layers), body.first, body.end, body.last
                )
                content = torch.frombuffer(data, dtype=torch.uint8)
                self._thread.receive(handover.key, part, content, body.ref.dtype)
                limit.reschedule(clock() + self._patience)
                if body.last and body.stop == len(handover.tokens):
                    await stream.end_input()
