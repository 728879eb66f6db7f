"""Serve the engine as an actor: role `decode`, operation `generate`.

The engine's thread passes the outputs of a whole step in one callback; the resulting frames leave
as one message per tokenizer process. Credit flows the other way: the engine pauses a request whose
caller does not read.
"""

from __future__ import annotations

import asyncio
import functools
import time
from dataclasses import dataclass, fields
from typing import Any, Literal

from motet_llm.adapters.bank import Adapter
from motet_llm.cache.cache_events import CacheReporter
from motet_llm.disaggregation.remote_prefill import RemotePrefill
from motet_llm.engine.engine import StepOutput
from motet_llm.engine.request import Key
from motet_llm.grammar.compiler import Grammars
from motet_llm.grammar.grammar import GrammarState
from motet_llm.grammar.token_spelling import Spelling
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_llm.serving.engine_actor import EngineActor
from motet_llm.serving.image_reader import ImageEmbeddingReader
from motet_llm.serving.profile import Profiler
from motet_shared.blobs.store import BlobStore
from motet_shared.messages import Cached, Generate, Profile, Tokens
from motet_shared.process.actor import operation
from motet_shared.process.config import Bytes, Duration, ProcessConfig, setting
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .config import MOST_DRAFTED, EngineConfig


@dataclass(frozen=True, kw_only=True)
class DecodeConfig(ProcessConfig):
    """Flags of `python -m motet_llm`. `EngineConfig` explains and checks the engine's settings."""

    model: str = setting("folder of the checkpoint to serve")
    name: str = setting("what clients call the model (default: the folder's name)", default="")
    device: str = setting(
        "where the model computes: cpu, cuda (the first GPU), cuda:1, …", default="cpu"
    )
    dtype: str = setting("of activations: auto, float32, bfloat16 or float16", default="auto")
    weights: str = setting(
        "of matrices: auto, float32, bfloat16, float16, int8, int4 or float8", default="auto"
    )
    kv_dtype: str = setting(
        "of the KV cache: auto, float32, bfloat16, float16, int8 or float8", default="auto"
    )
    threads: int = setting("cores that compute; 0: torch's choice", default=0, min=0)
    deterministic: bool = setting(
        "a request's tokens do not depend on the rest of the batch", default=False
    )
    overlap: bool = setting(
        "handle the tokens of a step while the next one is computed", default=True
    )
    block_size: int = setting("tokens per KV block", default=16, min=1)
    num_blocks: int = setting("KV blocks; 0: as many as fit into kv_memory", default=0, min=0)
    kv_memory: Bytes = setting(
        "memory of the KV cache; 0: 256 MiB, or a GPU's gpu_share", default=0, min=0
    )
    gpu_share: float = setting(
        "of a GPU's free memory that the KV cache takes", default=0.85, min=0
    )
    prefix_cache: bool = setting("share the blocks of prompts that begin alike", default=True)
    host_cache: Bytes = setting("memory for blocks that fell out of the KV cache", default=0, min=0)
    disk_cache: Bytes = setting(
        "disk space for blocks that fell out of host_cache", default=0, min=0
    )
    long_context: bool = setting(
        "sequences may be longer than the KV cache: the rest is in these two", default=False
    )
    cache_folder: str = setting(
        "where disk_cache lives (default: the place for temporary files)", default=""
    )
    token_budget: int = setting(
        "tokens computed per step, decode and prefill together", default=512, min=1
    )
    decode_slowdown: float = setting(
        "how much prefilling may stretch the steps of running streams", default=1.8, min=0
    )
    latency_goal: float = setting(
        "seconds between tokens up to which prefilling may stretch steps", default=0.0, min=0
    )
    max_running: int = setting("most requests in one step", default=64, min=1)
    max_waiting: int = setting(
        "most requests in the queue; further ones are refused", default=256, min=1
    )
    image_memory: Bytes = setting(
        "embeddings of images that requests hold", default=1 << 30, min=1 << 20
    )
    step_timeout: float = setting(
        "seconds after which a step is taken to hang: the process ends", default=120.0, min=1
    )
    speculate: str = setting(
        "who guesses tokens ahead: off, ngram (what was said before), or the folder of a draft model or of heads",
        default="off",
    )
    draft_tokens: int = setting(
        "most tokens that are guessed at a time", default=5, min=1, max=MOST_DRAFTED
    )
    adapters: tuple[str, ...] = setting("LoRA adapters as PEFT saves them, name=folder", default=())
    adapter_folder: str = setting(
        "whose subfolders are adapters too, by their own names", default=""
    )
    max_adapters: int = setting("adapters in memory at a time", default=16, min=1)
    max_rank: int = setting("most ranks that an adapter may have", default=64, min=1)
    attention_window: int = setting(
        "tokens that layers see which would see all that came before, whole blocks; 0: all",
        default=0,
        min=0,
    )
    attention_sinks: int = setting("first tokens that they see besides", default=16, min=0)
    attention_budget: int = setting(
        "tokens of a prompt that they keep, those its end attends to the most; 0: all",
        default=0,
        min=0,
    )
    attention_observe: int = setting(
        "last tokens of a prompt, kept too, whose attention decides", default=32, min=1
    )
    context: int = setting(
        "longest prompt plus output, tokens; 0: the model's own limit", default=0, min=0
    )
    grammar_timeout: float = setting(
        "seconds that a request's grammar may take to compile", default=10.0, min=0.1
    )
    grammar_cache: int = setting("compiled grammars that are kept", default=128, min=1)
    role: Literal["decode", "prefill"] = setting(
        "what it is: prefill computes prompts for decode", default="decode"
    )
    remote_prefill: Literal["auto", "always", "never"] = setting(
        "whether prefill workers compute prompts; auto: where that is expected to be quicker",
        default="auto",
    )
    prefill_patience: Duration = setting(
        "how long a prefill worker may say nothing new", default=5.0, min=0.1
    )
    transfer_memory: Bytes = setting(
        "of prefill: keys and values on their way", default=128 << 20, min=1 << 20
    )

    def engine(self) -> EngineConfig:
        """Return the engine's settings. Raises ConfigError."""
        shared = {f.name for f in fields(EngineConfig)} & {f.name for f in fields(self)}
        given = {name: getattr(self, name) for name in shared}
        if self.role == "prefill":
            given["speculate"] = "off"  # prefill workers draw no tokens
        return EngineConfig(**given)


class Decode(EngineActor):
    """Serve one model. Prompts may be computed by prefill workers."""

    role = "decode"

    def __init__(self, config: DecodeConfig, bus: Bus):
        super().__init__(config, bus, BlobStore.of(config, bus.instance))
        self._running: dict[Key, tuple[Call, asyncio.Future[StepOutput]]] = {}
        self._profiler = Profiler()
        self._reporter: CacheReporter | None = None
        self._remote: RemotePrefill | None = None
        self._image_reader = ImageEmbeddingReader(self.store, config.image_memory)
        self._grammars = Grammars(
            self._spelling, timeout=config.grammar_timeout, capacity=config.grammar_cache
        )

    async def warm(self) -> None:
        await super().warm()
        config, prefix_cache = self.config, self.thread.engine.prefix_cache
        if prefix_cache is not None:
            self._reporter = CacheReporter(self.bus, prefix_cache.changes)
            self.bus.monitor.duties.append(self._reporter.tick)
        self._remote = RemotePrefill(
            self.bus,
            self.store,
            self.thread,
            self.models(),
            config.remote_prefill,
            config.prefill_patience,
            self.crash,
        )
        self._remote.start()
        self._grammars.prepare()

    async def close(self) -> None:
        self._grammars.close()
        if self._remote is not None:
            await self._remote.close()
        await super().close()

    def _spelling(self) -> Spelling:
        runner = self.thread.engine.runner
        return Spelling.load(self.config.model, runner.vocab, runner.eos_ids)

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        """Stream the tokens of one request, one item per engine step, until it ends."""
        asked = time.perf_counter()
        async with (
            self.adapter_of(request.model, call.expires) as adapter,
            self._image_reader.reading(request.sights) as images,
        ):
            began = time.perf_counter()
            timing = {"decode.adapter": began - asked} if adapter is not None else {}
            grammar_state = await self._grammar_state(call, request)
            if grammar_state is not None:
                timing["decode.grammar"] = time.perf_counter() - began
            last = await self._generate(call, request, images, grammar_state, adapter)
        timing |= {f"decode.{stage}": seconds for stage, seconds in (last.timing or {}).items()}
        call.finish(last.finish or "stop", last.usage, timing)

    async def _grammar_state(self, call: Call, request: Generate) -> GrammarState | None:
        """Return the grammar state of the reply, or None; others continue while it compiles."""
        if request.grammar is None:
            return None
        return await self._grammars.grammar_state(
            request.grammar, request.output, call.expires, request.tenant.partition("\0")[0]
        )

    async def _generate(
        self,
        call: Call,
        request: Generate,
        images: list[ImageEmbedding],
        grammar_state: GrammarState | None,
        adapter: Adapter | None,
    ) -> StepOutput:
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
            images=images,
            grammar_state=grammar_state,
            adapter=adapter,
        )
        try:
            return await done
        finally:
            del self._running[call.id]
            if self._remote is not None:
                self._remote.stop(call.id)
            if not done.done() or done.cancelled():
                self.thread.cancel(call.id)

    @operation(Profile)
    async def profile(self, call: Call, request: Profile) -> None:
        """Record a torch trace of the engine's next steps."""
        self.check_served(request.model)
        await self._profiler.serve(call, request, self.thread)

    @operation(Cached)
    async def cached(self, call: Call, request: Cached) -> None:
        """Send what the prefix cache holds, for routers that missed some of its events."""
        if self._reporter is None:
            call.finish("stop")
        else:
            await self._reporter.serve(call)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            running = self._running.get(output.key)
            if running is None or running[1].done():
                continue
            call, done = running
            if output.handover is not None and self._remote is not None:
                self._remote.on_handover(call, output.handover)
            if output.ids:
                call.push(Tokens(output.ids, output.logprobs))
            if output.error is not None:
                done.set_exception(output.error)
            elif output.finish is not None:
                done.set_result(output)

    def load(self) -> dict[str, float]:
        return super().load() | {
            "cache_news": self._reporter.number if self._reporter is not None else 0
        }

    def stats(self) -> dict[str, Any]:
        if self._thread is None:
            return {}
        own = {
            "image_bytes": self._image_reader.held,
            **(self._remote.stats() if self._remote is not None else {}),
            **self._grammars.stats(),
        }
        return super().stats() | own
