"""The engine as an actor of role `prefill`: it computes prompts for decode workers, and keeps nothing of them.

Keys and values leave as blobs, chunk by chunk, while the next chunk is computed. Who does not read holds up its own
request only: a chunk is computed when those before it have found room in the store.
"""

from __future__ import annotations

import asyncio

from motet_shared.actor import operation
from motet_shared.blobs import BlobStore
from motet_shared.bus import HOST, Bus
from motet_shared.call import Call
from motet_shared.errors import BadRequest
from motet_shared.messages import BlobRef, KvPiece, Prefill, Sampling

from .adapter_bank import Adapter
from .engine import StepOutput
from .llm_worker import LlmWorker
from .request import Key
from .sender import Packed
from .worker import DecodeConfig

AHEAD = 2  # chunks of a request that may be computed before the first of them has found room
PARTS = 8  # that the store holds at least
WAIT = 5.0  # seconds for room in the store


class PrefillWorker(LlmWorker):
    """Serves one model to decode workers that have the same."""

    role = "prefill"

    def __init__(self, config: DecodeConfig, bus: Bus):
        super().__init__(config, bus, BlobStore.of(config, bus.instance, config.transfer_memory))
        self._outputs: dict[Key, asyncio.Queue[StepOutput]] = {}
        bus.directory.on_gone.append(self.store.forget)

    async def warm(self) -> None:
        await super().warm()
        self.thread.engine.sender.part_bytes = self.config.transfer_memory // PARTS

    @operation(Prefill)
    async def prefill(self, call: Call, request: Prefill) -> None:
        """`KvPiece` items while the prompt is computed; it ends when the caller has read all of their blobs."""
        self.check_served(request.model)
        self._check(request)
        async with self.adapter_of(request.model, call.expires) as adapter:
            await self._prefill(call, request, adapter)

    async def _prefill(self, call: Call, request: Prefill, adapter: Adapter | None) -> None:
        outputs = self._outputs[call.id] = asyncio.Queue()
        self.thread.submit(
            call.id,
            request.prompt,
            Sampling(max_tokens=1),
            credit=AHEAD,
            deadline=call.expires,
            priority=request.priority,
            tenant=request.tenant,
            adapter=adapter,
            send_from=request.start,
        )
        lent: list[BlobRef] = []
        try:
            last = await self._send(call, outputs, lent)
            async for _ in call.received():
                pass
        finally:
            del self._outputs[call.id]
            self.thread.cancel(call.id)
            for ref in lent:
                self.store.drop(ref)
        timing = {f"prefill.{stage}": seconds for stage, seconds in (last.timing or {}).items()}
        call.finish("stop", last.usage, timing)

    def _check(self, request: Prefill) -> None:
        card = next(card for card in self.models() if card.name == request.model)
        if not card.kv or request.kv != card.kv:
            raise BadRequest(
                f"kv: {request.kv!r} is not {card.kv!r}: keys and values of {self.bus.instance} are of another kind; "
                "serve the same checkpoint and adapters with the same --dtype, --weights and --deterministic",
                param="kv",
            )
        if not 0 <= request.start < len(request.prompt):
            raise BadRequest(
                f"start: {request.start} is not a token of a prompt of {len(request.prompt)}; give less", param="start"
            )

    async def _send(self, call: Call, outputs: asyncio.Queue[StepOutput], lent: list[BlobRef]) -> StepOutput:
        """Everything, as it is computed; the last output. `lent` grows with what is in the store."""
        digest = not self._shares_memory(call.caller)
        granted = AHEAD
        while True:
            output = await outputs.get()
            if output.error is not None:
                raise output.error
            for packed in output.packed or ():
                await call.send(await self._lend(call, packed, lent, digest=digest))
            if output.finish is not None:
                return output
            granted += 1
            self.thread.grant(call.id, granted)

    def _shares_memory(self, instance: str) -> bool:
        """Whether it runs on this host: what it reads does not travel, and checksums would take longer than copies."""
        return any(beat.instance == instance and beat.host == HOST for beat in self.bus.directory.everyone())

    async def _lend(self, call: Call, packed: Packed, lent: list[BlobRef], digest: bool) -> KvPiece:
        data, part = packed.content.numpy().data, packed.part
        ref = await self.store.put_async(data, packed.dtype, wait=WAIT, readers=[call.caller], digest=digest)
        lent.append(ref)
        return KvPiece(part.start, part.stop, list(part.layers), part.first, part.end, ref, part.last)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            if (queue := self._outputs.get(output.key)) is not None:
                queue.put_nowait(output)
