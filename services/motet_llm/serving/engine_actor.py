"""Run an engine as an actor: the part that workers of all roles share."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from motet_kernels.runtime.device import readings
from motet_llm.adapters.adapter_cache import AdapterCache
from motet_llm.adapters.adapter_folder_watch import AdapterFolderWatch
from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.config import DecodeConfig
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.thread import EngineThread
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import ModelCard, SwitchRole
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from . import role_change as role

log = logging.getLogger(__name__)

# Counts since the start and the size of the cache, which `motet doctor` examines.
_DIAGNOSED = (
    "decode_steps",
    "decode_seconds",
    "mixed_steps",
    "mixed_seconds",
    "mixed_tokens",
    "preemptions",
    "evictions",
    "recomputed_tokens",
    "kv_bytes",
)


class EngineActor(Actor):
    """Run one model's engine on its thread, with a blob store.

    Subclasses add the operations of a role.
    """

    config: DecodeConfig

    def __init__(self, config: DecodeConfig, bus: Bus, store: BlobStore):
        super().__init__(config, bus)
        self.max_active = config.max_running + config.max_waiting
        self.store = store
        self._thread: EngineThread | None = None
        self._card: ModelCard | None = None
        self._watch: AdapterFolderWatch | None = None
        self._residents: AdapterCache | None = None

    async def wait_for_memory(self) -> None:
        """Do not wait: the engine does, once it has prepared all that takes little memory."""

    async def warm(self) -> None:
        engine = await asyncio.to_thread(self._make_engine)
        self._card = engine.card()
        await self.store.start()
        self._thread = EngineThread.on_loop(engine, self._deliver, self.crash)
        loop = asyncio.get_running_loop()
        engine.runner.watch(lambda error: _call_on(loop, lambda: self.crash(error)))
        self._know_adapters(engine)
        self.bus.monitor.duties.append(self.thread.watch(self.config.step_timeout))
        about = {"model": self._card.name, "context": self._card.context}
        log.info("model loaded", extra=about | engine.runner.capacity())

    def _make_engine(self) -> Engine:
        """Load the model; called on a thread."""
        return Engine(self.config.engine())

    def _know_adapters(self, engine: Engine) -> None:
        bank = engine.runner.adapters
        if bank is None:
            return
        self._residents = AdapterCache(bank, self._after_step)
        if self.config.adapter_folder:
            given = [entry.partition("=")[0] for entry in self.config.adapters]
            self._watch = AdapterFolderWatch(
                Path(self.config.adapter_folder),
                [self.card.name, *given],
                bank,
                self._residents,
                self._change_bank,
            )
            self.bus.monitor.duties.append(self._watch.tick)

    async def _change_bank(self, change: Callable[[], bool]) -> None:
        """Run `change` between two steps; recordings of steps end with factors that it moves."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[None] = loop.create_future()
        runner = self.thread.engine.runner

        def finish() -> None:
            if not done.cancelled():
                done.set_result(None)

        def run() -> None:
            if change():
                runner.forget_recordings()
            _call_on(loop, finish)

        self.thread.between_steps(run)
        await done

    def _after_step(self, function: Callable[[], None]) -> None:
        """Call `function` on the loop once a step that may be running now has ended."""
        loop = asyncio.get_running_loop()
        self.thread.between_steps(lambda: _call_on(loop, function))

    @asynccontextmanager
    async def adapter_of(
        self, model: str, deadline: float | None
    ) -> AsyncIterator[ResidentAdapter | None]:
        """Hold the adapter that `model` names within the block; None for the model itself.

        Leave the block after the request has left the engine, or has been cancelled there.
        """
        self.check_served(model)
        if self._residents is None or model == self.card.name:
            yield None
            return
        async with self._residents.holding(model, deadline) as adapter:
            yield adapter

    async def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
        if self._residents is not None:
            self._residents.close()
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

    @operation(SwitchRole)
    async def switch_role(self, call: Call, request: SwitchRole) -> None:
        """Drain and restart in another role; a request for the present role changes nothing.

        Raises Unavailable if no other worker would decode for the model.
        """
        role.check(request, self.role, self.bus.directory, self.bus.instance, self.card.name)
        if request.role != self.role:
            self.becomes = role.command_line(request.role, sys.argv[1:])
            self.leave.set()
        call.finish("stop")

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """Deliver all outputs of one step, on the loop.

        Outputs of requests that were cancelled meanwhile may be among them.
        """
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
            "engine_busy": self._thread.busy_seconds,
            **{name: stats[name] for name in _DIAGNOSED},
            **self._thread.engine.load(),
            **readings(),
            **({} if self._residents is None else {"adapter_load": self._residents.load_seconds}),
        }

    def models(self) -> list[ModelCard]:
        """Return the model's card, then those of its adapters."""
        if self._card is None or self._residents is None:
            return [self._card] if self._card else []
        bank, is_resident = self.thread.engine.runner.adapters, self._residents.is_resident
        assert bank is not None
        cards = [bank.card(name, self._card) for name in bank.names]
        return [self._card, *(replace(card, resident=is_resident(card.name)) for card in cards)]

    def stats(self) -> dict[str, Any]:
        """Return numbers, exported as metrics, and the choices made when the model was loaded."""
        if self._thread is None:
            return {}
        adapters = self._residents.stats() if self._residents is not None else {}
        return (
            self._thread.stats()
            | self.store.stats()
            | adapters
            | self._thread.engine.runner.describe()
        )

    def check_integrity(self) -> None:
        """Check the invariants of an idle actor; the engine is checked on this thread."""
        super().check_integrity()
        self.thread.engine.check_integrity()
        self.store.check_integrity()
        if self._residents is not None:
            self._residents.check_integrity()


def _call_on(loop: asyncio.AbstractEventLoop, function: Callable[[], object]) -> None:
    with suppress(RuntimeError):  # the loop is closed: no call is needed any more
        loop.call_soon_threadsafe(function)
