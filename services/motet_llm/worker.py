"""The engine as an actor: role `decode`, operation `generate`.

The engine's thread hands over the outputs of a whole step in one callback; the frames that come of it leave as one
message per tokenizer process. Credit goes the other way: a request whose caller does not read is paused by the engine.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from dataclasses import dataclass, fields
from typing import Any

from motet_shared.actor import Actor, operation
from motet_shared.blobs import BlobStore
from motet_shared.bus import Bus
from motet_shared.call import Call
from motet_shared.config import Bytes, ProcessConfig, setting
from motet_shared.messages import Cached, Generate, ModelCard, Profile, Tokens

from .cache_news import CacheReporter
from .config import EngineConfig
from .engine import Engine, StepOutput
from .profile import Profiler
from .request import Key
from .sight_reader import SightReader
from .sights import Sight
from .thread import EngineThread

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ProcessConfig):
    """Flags of `python -m motet_llm`. `EngineConfig` says what the engine's own settings mean and checks them."""

    model: str = setting("folder of the checkpoint to serve")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    device: str = setting("where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu")
    dtype: str = setting("of activations: auto, float32, bfloat16 or float16", default="auto")
    weights: str = setting("of matrices: auto, float32, bfloat16, float16, int8 or int4", default="auto")
    kv_dtype: str = setting("of the KV cache: auto, float32, bfloat16 or float16", default="auto")
    threads: int = setting("cores that compute; 0: torch's choice", default=0, min=0)
    deterministic: bool = setting("a request's tokens do not depend on the rest of the batch", default=False)
    overlap: bool = setting("handle the tokens of a step while the next one is computed", default=True)
    block_size: int = setting("tokens per KV block", default=16, min=1)
    num_blocks: int = setting("KV blocks; 0: as many as fit into kv_memory", default=0, min=0)
    kv_memory: Bytes = setting("memory of the KV cache; 0: 256 MiB, or a GPU's gpu_share", default=0, min=0)
    gpu_share: float = setting("of a GPU's free memory that the KV cache takes", default=0.85, min=0)
    prefix_cache: bool = setting("share the blocks of prompts that begin alike", default=True)
    host_cache: Bytes = setting("memory for blocks that fell out of the KV cache", default=0, min=0)
    disk_cache: Bytes = setting("disk space for blocks that fell out of host_cache", default=0, min=0)
    cache_folder: str = setting("where disk_cache lives (default: the place for temporary files)", default="")
    token_budget: int = setting("tokens computed per step, decode and prefill together", default=512, min=1)
    decode_slowdown: float = setting("how much prefilling may stretch the steps of running streams", default=1.8, min=0)
    latency_goal: float = setting("seconds between tokens up to which prefilling may stretch steps", default=0.0, min=0)
    max_running: int = setting("most requests in one step", default=64, min=1)
    max_waiting: int = setting("most requests in the queue; further ones are refused", default=256, min=1)
    image_memory: Bytes = setting("embeddings of images that requests hold", default=1 << 30, min=1 << 20)
    step_timeout: float = setting("seconds after which a step is taken to hang: the process ends", default=120.0, min=1)
    context: int = setting("longest prompt plus output, tokens; 0: the model's own limit", default=0, min=0)

    def engine(self) -> EngineConfig:
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        return EngineConfig(**{name: getattr(self, name) for name in shared})


class Decode(Actor):
    """Serves one model. Prefills for itself."""

    role = "decode"

    def __init__(self, config: DecodeConfig, bus: Bus):
        super().__init__(config, bus)
        self.max_active = config.max_running + config.max_waiting
        self._running: dict[Key, tuple[Call, asyncio.Future[StepOutput]]] = {}
        self._thread: EngineThread | None = None
        self._card: ModelCard | None = None
        self._profiler = Profiler()
        self._reporter: CacheReporter | None = None
        self._store = BlobStore(bus.instance)
        self._sights = SightReader(self._store, config.image_memory)

    async def warm(self) -> None:
        engine = await asyncio.to_thread(Engine, self.config.engine())
        self._card = engine.card()
        await self._store.start()
        if engine.prefix_cache is not None:
            self._reporter = CacheReporter(self.bus, engine.prefix_cache.changes)
            self.bus.monitor.duties.append(self._reporter.tick)
        self._thread = EngineThread.on_loop(engine, self._deliver, self.crash)
        self.bus.monitor.duties.append(self.thread.watch(self.config.step_timeout))
        log.info("model loaded", extra={"model": self._card.name, "context": self._card.context})

    async def close(self) -> None:
        if self._thread is not None:
            await asyncio.to_thread(self._thread.stop)
            await self._store.close()

    @property
    def thread(self) -> EngineThread:
        if self._thread is None:
            raise RuntimeError("the engine is not loaded yet")
        return self._thread

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        """Tokens of one request, one item per engine step, until it ends."""
        self.check_served(request.model)
        async with self._sights.reading(request.sights) as sights:
            await self._generate(call, request, sights)

    async def _generate(self, call: Call, request: Generate, sights: list[Sight]) -> None:
        done: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        self._running[call.id] = (call, done)
        call.on_credit = functools.partial(self.thread.grant, call.id)
        self.thread.submit(
            call.id,
            request.prompt,
            request.sampling,
            output=request.output,
            credit=call.credit_total,
            deadline=call.expires,
            priority=request.priority,
            tenant=request.tenant,
            sights=sights,
        )
        try:
            last = await done
        finally:
            del self._running[call.id]
            if not done.done() or done.cancelled():
                self.thread.cancel(call.id)
        timing = {f"decode.{stage}": seconds for stage, seconds in (last.timing or {}).items()}
        call.finish(last.finish or "stop", last.usage, timing)

    @operation(Profile)
    async def profile(self, call: Call, request: Profile) -> None:
        """A torch trace of the engine's next steps."""
        self.check_served(request.model)
        await self._profiler.serve(call, request, self.thread)

    @operation(Cached)
    async def cached(self, call: Call, request: Cached) -> None:
        """What the prefix cache holds: for routers that missed some news of it."""
        if self._reporter is None:
            call.finish("stop")
        else:
            await self._reporter.serve(call)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        """All outputs of one step, on the loop. A request that was cancelled meanwhile is no longer listed."""
        for output in outputs:
            running = self._running.get(output.key)
            if running is None or running[1].done():
                continue
            call, done = running
            if output.ids:
                call.push(Tokens(output.ids, output.logprobs))
            if output.error is not None:
                done.set_exception(output.error)
            elif output.finish is not None:
                done.set_result(output)

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
            "cache_news": self._reporter.number if self._reporter is not None else 0,
            **self._thread.engine.load(),
        }

    def models(self) -> list[ModelCard]:
        return [self._card] if self._card else []

    def stats(self) -> dict[str, Any]:
        """Numbers, which are metrics too, and words: what was chosen when the model was loaded."""
        if self._thread is None:
            return {}
        return self._thread.stats() | {"image_bytes": self._sights.held} | self._thread.engine.runner.describe()

    def check_integrity(self) -> None:
        """For an idle actor: the engine is checked on this thread."""
        super().check_integrity()
        self.thread.engine.check_integrity()
