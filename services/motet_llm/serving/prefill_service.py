"""Serve the engine as an actor of role `prefill`: compute prompts for decode workers.

Keys and values leave as blobs, chunk by chunk, while the next chunk is computed; none are kept for
requests that have ended. A slow reader holds up its own request only: a chunk is computed when the
store has had room for those before it.
"""

from __future__ import annotations

import asyncio

from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.config import DecodeConfig
from motet_llm.disaggregation.kv_transfer import PackedPart, adapted
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.request import Key
from motet_shared import messages
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import BadRequest
from motet_shared.messages import BlobRef, KvChunk, Sampling
from motet_shared.process.actor import operation
from motet_shared.wire.bus import HOST, Bus
from motet_shared.wire.call import Call

from .engine_actor import EngineActor

CHUNKS_AHEAD = (
    2  # chunks of a request that may be computed before the first of them is in the store
)
MIN_STORE_PARTS = 8  # minimum capacity of the store in parts
STORE_TIMEOUT = 5.0  # seconds to wait for room in the store


class Prefill(EngineActor):
    """Prefill prompts of one model for decode workers of the same model."""

    role = "prefill"

    def __init__(self, config: DecodeConfig, bus: Bus):
        super().__init__(config, bus, BlobStore.of(config, bus, config.transfer_memory))
        self._outputs: dict[Key, asyncio.Queue[StepOutput]] = {}

    async def warm(self) -> None:
        await super().warm()
        self.thread.engine.sender.part_bytes = self.config.transfer_memory // MIN_STORE_PARTS

    @operation(messages.Prefill)
    async def prefill(self, call: Call, request: messages.Prefill) -> None:
        """Send `KvChunk` items while the prompt is computed; end when their blobs are read.

        Raises BadRequest if the caller's keys and values are incompatible, or `start` is no token
        of the prompt.
        """
        self.check_served(request.model)
        self._check(request, next(c for c in self.models() if c.name == request.model).kv_format)
        async with self.adapter_of(request.model, call.expires) as adapter:
            if adapter is not None:  # it may have been replaced meanwhile
                self._check(request, adapted(self.card.kv_format, adapter.digest))
            await self._prefill(call, request, adapter)

    async def _prefill(
        self, call: Call, request: messages.Prefill, adapter: ResidentAdapter | None
    ) -> None:
        outputs = self._outputs[call.id] = asyncio.Queue()
        self.thread.submit(
            call.id,
            request.prompt,
            Sampling(max_tokens=1),
            credit=CHUNKS_AHEAD,
            deadline=call.expires,
            priority=request.priority,
            tenant=request.tenant,
            adapter=adapter,
            send_from=request.start,
        )
        published: list[BlobRef] = []
        try:
            last = await self._send(call, outputs, published)
            async for _ in call.received():
                pass
        finally:
            del self._outputs[call.id]
            self.thread.cancel(call.id)
            for ref in published:
                self.store.drop(ref)
        timing = {f"prefill.{stage}": seconds for stage, seconds in (last.timing or {}).items()}
        call.finish("stop", last.usage, timing)

    def _check(self, request: messages.Prefill, kv_format: str) -> None:
        if not kv_format or request.kv_format != kv_format:
            raise BadRequest(
                f"kv_format: {request.kv_format!r} differs from {kv_format!r} of "
                f"{self.bus.instance}; serve the same checkpoint and adapters with the same "
                "--dtype, --weights and --deterministic",
                param="kv_format",
            )
        if not 0 <= request.start < len(request.prompt):
            raise BadRequest(
                f"start: {request.start} is not a token of a prompt of {len(request.prompt)}; give less",
                param="start",
            )

    async def _send(
        self, call: Call, outputs: asyncio.Queue[StepOutput], published: list[BlobRef]
    ) -> StepOutput:
        """Send all parts as they are computed, and return the last output.

        `published` grows by each blob that is put into the store.
        """
        digest = not self._shares_memory(call.caller)
        granted = CHUNKS_AHEAD
        while True:
            output = await outputs.get()
            if output.error is not None:
                raise output.error
            for packed in output.packed or ():
                await call.send(await self._publish(call, packed, published, digest=digest))
            if output.finish is not None:
                return output
            granted += 1
            self.thread.grant(call.id, granted)

    def _shares_memory(self, instance: str) -> bool:
        """Return True if an instance runs on this host.

        Its reads need no network, and checksums would take longer than copies.
        """
        return any(
            beat.instance == instance and beat.host == HOST
            for beat in self.bus.directory.everyone()
        )

    async def _publish(
        self, call: Call, packed: PackedPart, published: list[BlobRef], digest: bool
    ) -> KvChunk:
        data, part = packed.content.numpy().data, packed.part
        ref = await self.store.put_async(
            data, packed.dtype, wait=STORE_TIMEOUT, readers=[call.caller], digest=digest
        )
        published.append(ref)
        return KvChunk(
            part.start, part.stop, list(part.layers), part.first, part.end, ref, part.last
        )

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if (queue := self._outputs.get(output.key)) is not None:
                queue.put_nowait(output)
