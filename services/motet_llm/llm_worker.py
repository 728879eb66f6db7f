"""An engine as an actor: what workers of every role have in common."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Any

from motet_shared.actor import Actor, operation
from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.call import Call
from motet_shared.messages import Become, ModelCard

from . import role
from .engine import Engine, StepOutput
from .thread import EngineThread

if TYPE_CHECKING:
    from .worker import DecodeConfig

log = logging.getLogger(__name__)


class LlmWorker(Actor):
    """An engine for one model on its thread, and a store for what travels beside the wire. Roles add operations."""

    config: DecodeConfig

    def __init__(self, config: DecodeConfig, bus: Bus, store: BlobStore):
        super().__init__(config, bus)
        self.max_active = config.max_running + config.max_waiting
        self.store = store
        self._thread: EngineThread | None = None
        self._card: ModelCard | None = None

    async def warm(self) -> None:
        engine = await asyncio.to_thread(Engine, self.config.engine())
        self._card = engine.card()
        await self.store.start()
        self._thread = EngineThread.on_loop(engine, self._deliver, self.crash)
        self.bus.monitor.duties.append(self.thread.watch(self.config.step_timeout))
        log.info("model loaded", extra={"model": self._card.name, "context": self._card.context})

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
            await self.store.close()

    @property
    def thread(self) -> EngineThread:
        if self._thread is None:
            raise RuntimeError("the engine is not loaded yet")
        return self._thread

    @property
    def card(self) -> ModelCard:
        if self._card is None:
            raise RuntimeError("the engine is not loaded yet")
        return self._card

    @operation(Become)
    async def become(self, call: Call, request: Become) -> None:
        """Drain, and go on in another role; the same one changes nothing. Refused where nobody else would decode."""
        role.check(request, self.role, self.bus.directory, self.bus.instance, self.card.name)
        if request.role != self.role:
            self.becomes = role.command_line(request.role, sys.argv[1:])
            self.leave.set()
        call.finish("stop")

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """All outputs of one step, on the loop. A request that was cancelled meanwhile is no longer listed."""
        raise NotImplementedError

    def load(self) -> dict[str, float]:
        if self._thread is None:
            return {}
        stats = self._thread.stats()
        return {
            "running": stats["running"],
            "queued": stats["waiting"] + stats["commands"],
            "kv_free": stats["blocks_free"] / max(stats["blocks_total"], 1),
            "batch": stats["batch_size"],
            "tokens": stats["tokens"],
            **self._thread.engine.load(),
        }

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Numbers, which are metrics too, and words: what was chosen when the model was loaded."""
        if self._thread is None:
            return {}
        return self._thread.stats() | self.store.stats() | self._thread.engine.runner.describe()

    def check_integrity(self) -> None:
        """For an idle actor: the engine is checked on this thread."""
        super().check_integrity()
        self.thread.engine.check_integrity()
        self.store.check_integrity()
