"""Serve the engine as an actor: role `decode`, operation `generate`.

The engine's thread passes the outputs of a whole step in one callback; the resulting frames leave
as one message per tokenizer process. Credit flows the other way: the engine pauses a request whose
caller does not read.
"""

from __future__ import annotations

import asyncio
import functools
import time
from typing import Any

from motet_llm.adapters.bank import ResidentAdapter
from motet_llm.cache.cache_events import CacheReporter
from motet_llm.disaggregation.remote_placement import RemotePlacement
from motet_llm.disaggregation.remote_prefill import RemotePrefill
from motet_llm.engine.engine import Engine
from motet_llm.engine.outputs import StepOutput
from motet_llm.engine.request import Key
from motet_llm.grammar.compiler import GrammarCache
from motet_llm.grammar.grammar import GrammarState
from motet_llm.grammar.token_spelling import Spelling
from motet_llm.models.image_embeddings import ImageEmbedding
from motet_llm.serving.engine_actor import EngineActor
from motet_llm.serving.image_reader import ImageEmbeddingReader
from motet_llm.serving.profile import Profiler
from motet_llm.stages.states import GivenStates, SentStates
from motet_llm.stages.transport import (
    read_given,
    received_states,
    sends_states,
    split_frames,
    store_states,
)
from motet_shared.blobs.store import BlobStore
from motet_shared.errors import UnsupportedParameter, as_motet_error
from motet_shared.messages import Generate, ListBlocks, Profile, StatedTokens, Tokens
from motet_shared.process.actor import operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .config import DecodeConfig

_GRAMMARS_AFTER = 2.0  # seconds from the start until what grammars need is loaded


class Decode(EngineActor):
    """Serve one model. Prompts may be computed by prefill workers."""

    role = "decode"

    def __init__(self, config: DecodeConfig, bus: Bus):
        capacity = config.states_memory if sends_states(config) else 0
        super().__init__(config, bus, BlobStore.of(config, bus, capacity))
        self._lost_states = 0
        self._running: dict[Key, tuple[Call, asyncio.Future[StepOutput]]] = {}
        self._profiler = Profiler()
        self._reporter: CacheReporter | None = None
        self._placement = RemotePlacement(config.model_name, config.remote_prefill)
        self._remote: RemotePrefill | None = None
        self._preparing: asyncio.TimerHandle | None = None
        self._image_reader = ImageEmbeddingReader(self.store, config.image_memory)
        self._grammars = GrammarCache(
            self._spelling, timeout=config.grammar_timeout, capacity=config.grammar_cache
        )

    def _make_engine(self) -> Engine:
        placement = None if self._placement.policy == "never" else self._placement
        return Engine(self.config.engine(), placement=placement)

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
            self._placement,
            self.models()[0],
            config.prefill_patience,
            self.crash,
        )
        self._remote.start()
        # It takes a core for a moment, which the first tokens of a model that was waited for need.
        self._preparing = asyncio.get_running_loop().call_later(
            _GRAMMARS_AFTER, self._grammars.prepare
        )

    async def close(self) -> None:
        if self._preparing is not None:
            self._preparing.cancel()
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
        if request.return_states and not self.store.capacity:
            raise UnsupportedParameter(
                f"return_states: {request.model!r} has no next stage; leave it out",
                param="return_states",
            )
        async with (
            self.adapter_of(request.model, call.expires) as adapter,
            self._image_reader.reading(request.image_embeddings) as images,
        ):
            began = time.perf_counter()
            timing = {"decode.adapter": began - asked} if adapter is not None else {}
            grammar_state = await self._grammar_state(call, request)
            if grammar_state is not None:
                timing["decode.grammar"] = time.perf_counter() - began
            given = None if request.input_states is None else await self._given_states(request)
            last = await self._generate(call, request, images, grammar_state, adapter, given)
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
        adapter: ResidentAdapter | None,
        given: GivenStates | None,
    ) -> StepOutput:
        output = split_frames(request.output, self._groups)[0]
        done: asyncio.Future[StepOutput] = asyncio.get_running_loop().create_future()
        self._running[call.id] = (call, done)
        call.on_credit = functools.partial(self.thread.grant, call.id)
        if self._remote is not None:
            self._remote.limit(call)
        self.thread.submit(
            call.id,
            request.prompt,
            request.sampling,
            output=output,
            credit=call.credit_total,
            deadline=call.expires,
            priority=request.priority,
            tenant=request.tenant,
            images=images,
            grammar_state=grammar_state,
            adapter=adapter,
            sends_states=request.return_states,
            given_states=given,
        )
        feeding = None if given is None else asyncio.create_task(self._feed(call, given, done))
        try:
            return await done
        finally:
            del self._running[call.id]
            if not done.done() or done.cancelled():
                self.thread.cancel(call.id)
            if self._remote is not None:
                self._remote.forget(call.id)
            if feeding is not None:  # last: a cancel may end this wait
                feeding.cancel()
                await asyncio.gather(feeding, return_exceptions=True)

    async def _given_states(self, request: Generate) -> GivenStates:
        """Return the states that a request came with. Raises BadRequest, BlobError."""
        assert request.input_states is not None
        _, codes = split_frames(request.output, self._groups)
        return await read_given(self.store, request.input_states, request.replaced, codes)

    @property
    def _groups(self) -> int:
        """Return how many codes a frame has; 1 for models of text."""
        predictor = self.thread.engine.runner.predictor
        return 1 if predictor is None else 1 + predictor.groups

    async def _feed(self, call: Call, given: GivenStates, done: asyncio.Future[StepOutput]) -> None:
        """Pass the states that are fed on to the engine, until their end; a wrong one ends the call."""
        try:
            async for states_MW in received_states(call.received(), given.states_MW.shape[1]):
                self.thread.feed_states(call.id, states_MW, ended=False)
        except Exception as error:  # else the engine waits for states until the call's deadline
            self._fail(call, done, error)
        else:
            self.thread.feed_states(call.id, given.states_MW[:0], ended=True)

    @operation(Profile)
    async def profile(self, call: Call, request: Profile) -> None:
        """Record a torch trace of the engine's next steps."""
        self.check_served(request.model)
        await self._profiler.serve(call, request, self.thread)

    @operation(ListBlocks)
    async def list_blocks(self, call: Call, request: ListBlocks) -> None:
        """Send what the prefix cache holds, for routers that missed some of its events."""
        if self._reporter is None:
            call.finish("stop")
        else:
            await self._reporter.serve(call)

    def _deliver(self, outputs: list[StepOutput]) -> None:
        for output in outputs:
            running = self._running.get(output.key)
            if running is None or running[1].done():
                if output.handover is not None and self._remote is not None:
                    self._remote.drop(output.handover)
                continue
            call, done = running
            try:
                self._pass_on(output, call, done)
            except Exception as error:  # those of other calls follow
                self._fail(call, done, error)

    def _fail(self, call: Call, done: asyncio.Future[StepOutput], error: Exception) -> None:
        """End a call with an error that was raised beside it."""
        self.thread.cancel(call.id)
        if not done.done():
            done.set_exception(as_motet_error(error))

    def _pass_on(self, output: StepOutput, call: Call, done: asyncio.Future[StepOutput]) -> None:
        """Send an output to its call, or end it."""
        if output.handover is not None and self._remote is not None:
            self._remote.on_handover(call, output.handover)
        if output.scores is not None:
            call.push(output.scores)
        if output.states is not None:
            self._push_states(call, output, output.states)
        elif output.ids or output.logprobs:
            call.push(Tokens([*output.ids, *(output.codes or ())], output.logprobs))
        if output.error is not None:
            done.set_exception(output.error)
        elif output.finish is not None:
            done.set_result(output)

    def _push_states(self, call: Call, output: StepOutput, sent: SentStates) -> None:
        """Send tokens with their states, or alone if the store has no room: text goes on then."""
        ref = store_states(self.store, sent)
        if ref is None:
            self._lost_states += 1
            call.push(Tokens(output.ids, output.logprobs))
        else:
            call.push(StatedTokens(output.ids, output.logprobs, states=ref))

    def load(self) -> dict[str, float]:
        return super().load() | {
            "cache_updates": self._reporter.number if self._reporter is not None else 0
        }

    def stats(self) -> dict[str, Any]:
        if self._thread is None:
            return {}
        own = {
            "image_bytes": self._image_reader.held,
            "states_lost": self._lost_states,
            **(self._remote.stats() if self._remote is not None else {}),
            **self._grammars.stats(),
        }
        return super().stats() | own
