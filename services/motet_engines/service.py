"""Serve another engine as an actor: role `decode`, operation `generate`."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

from motet_shared.blobs.store import BlobStore
from motet_shared.errors import Unavailable
from motet_shared.messages import CountedTokens, Generate, ModelCard, PromptScores, Tokens, Usage
from motet_shared.process.actor import Actor, operation
from motet_shared.process.vitals import count_gpus
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .breaker import Breaker
from .card import model_cards
from .checks import check_request
from .config import EnginesConfig
from .continuation import remaining, scores_prompt
from .engine import Engine, StepOutput
from .engines import create_engine
from .pace import Measured, Pace
from .pictures import Picture, PictureFiles
from .trials import Trials

log = logging.getLogger(__name__)

SCORES = 256  # of prompt tokens in a message


class EngineHost(Actor):
    """Serve one model of another engine.

    While the engine does not answer, or fails one request after the other, the instance is `warming`:
    it takes no new work, and replies that were broken go on at other instances.
    """

    role = "decode"
    config: EnginesConfig

    def __init__(self, config: EnginesConfig, bus: Bus, engine: Engine | None = None):
        super().__init__(config, bus)
        self.max_active = config.max_running
        self._engine = engine or create_engine(config)
        self._files = PictureFiles(BlobStore.of(config, bus), config.image_memory)
        self._cards: list[ModelCard] = []
        self._pace = Pace()
        self._breaker = Breaker(config.breaker_failures, config.breaker_pause)
        self._answers = True
        self._trials = Trials(config, self._engine, self._breaker, self._pace, self._on_trial)

    async def warm(self) -> None:
        served = await self._engine.start(self._on_health, self.crash)
        self._cards = model_cards(self.config, served, self._engine.features)
        await self._files.start()
        self._trials.start(self.crash)
        log.info("engine ready", extra={"model": self.config.model_name} | self._engine.describe())

    async def close(self) -> None:
        await self._trials.close()
        await self._engine.close()
        await self._files.close()

    def _on_health(self, answers: bool) -> None:
        self._answers = answers
        self._update("answers" if answers else "does not answer")

    def _on_trial(self) -> None:
        self._update("answers a trial" if not self._breaker.is_open else "fails all requests")

    def _update(self, what: str) -> None:
        """Take work only while the engine answers and does not fail all requests."""
        is_able = self._answers and not self._breaker.is_open
        wanted = "ready" if is_able else "warming"
        if self.bus.state in ("ready", "warming") and self._cards and self.bus.state != wanted:
            log.warning("the engine %s", what, extra={"engine": self.config.engine})
            self.bus.set_state(wanted)

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        """Stream the tokens of one request until it ends."""
        self.check_served(request.model)
        check_request(request, self._engine.features, self.config.engine)
        if remaining(request) <= 0 and not scores_prompt(request):
            call.finish("length", Usage(len(request.prompt)))
            return
        async with self._files.reading(request) as pictures:
            await self._generate(call, request, pictures)

    async def _generate(self, call: Call, request: Generate, pictures: Sequence[Picture]) -> None:
        with Measured(self._pace, call.id, len(request.prompt), request.priority) as measured:
            outputs = self._engine.generate(call.id, request, call.expires, pictures)
            try:
                async with aclosing(outputs):
                    async for output in outputs:
                        self._breaker.replied()
                        await self._send(call, request, output, measured)
                        if output.finish:
                            return
                raise Unavailable(f"{self.config.engine} ended a reply without a reason")
            except Unavailable:
                if self._breaker.failed():
                    self._on_trial()
                    self._trials.wake()
                raise

    async def _send(
        self, call: Call, request: Generate, output: StepOutput, measured: Measured
    ) -> None:
        for at in range(0, len(output.scores or ()), SCORES):
            await call.send(PromptScores(1 + at, (output.scores or [])[at : at + SCORES]))
        if output.ids:
            measured.note(len(output.ids), output.cached_tokens)
            waited = time.monotonic()
            await call.send(_tokens(output))
            if time.monotonic() - waited > 0.001:
                measured.restart_clock()
        if output.finish:
            length = output.prompt_tokens or len(request.prompt)
            usage = Usage(length, cached_tokens=max(output.cached_tokens, 0))
            call.finish(output.finish, usage, measured.timing())

    def models(self) -> list[ModelCard]:
        return self._cards

    def load(self) -> dict[str, float]:
        """Return what was measured here; what the engine reports itself takes precedence."""
        return self._pace.load() | self._gpus_held() | self._engine.load()

    def _gpus_held(self) -> dict[str, float]:
        """Return the number of GPUs of an engine that this host has started; none of a server."""
        return {} if self.config.engine_url else {"gpus_held": float(count_gpus())}

    def stats(self) -> dict[str, Any]:
        breaker = {"breaker_open": self._breaker.is_open, "breaker_opened": self._breaker.opened}
        return self._pace.load() | breaker | self._engine.describe()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._pace.check_integrity()
        self._files.check_integrity()


def _tokens(output: StepOutput) -> Tokens:
    if not output.prompt_tokens:
        return Tokens(output.ids, output.logprobs)
    return CountedTokens(output.ids, output.logprobs, prompt_tokens=output.prompt_tokens)
