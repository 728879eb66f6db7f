"""Serve another engine as an actor: role `decode`, operation `generate`."""

from __future__ import annotations

import logging
import time
from contextlib import aclosing
from typing import Any

from motet_shared.errors import Unavailable
from motet_shared.messages import Generate, ModelCard, Tokens, Usage
from motet_shared.process.actor import Actor, operation
from motet_shared.wire.bus import Bus
from motet_shared.wire.call import Call

from .card import model_cards
from .checks import check_request
from .config import EnginesConfig
from .engine import Engine, StepOutput
from .openai.engine import OpenAIEngine
from .pace import Measured, Pace

log = logging.getLogger(__name__)


class EngineHost(Actor):
    """Serve one model of another engine.

    While the engine does not answer, the instance is `warming`: it takes no new work, and replies
    that were broken go on at other instances.
    """

    role = "decode"
    config: EnginesConfig

    def __init__(self, config: EnginesConfig, bus: Bus, engine: Engine | None = None):
        super().__init__(config, bus)
        self.max_active = config.max_running
        self._engine = engine or OpenAIEngine(config)
        self._cards: list[ModelCard] = []
        self._pace = Pace()
        self._is_down = False

    async def warm(self) -> None:
        served = await self._engine.start(self._on_health, self.crash)
        features = self._engine.features
        self._cards = model_cards(self.config, served, takes_chats=not features.raw_prompts)
        log.info("engine ready", extra={"model": self.config.model_name} | self._engine.describe())

    async def close(self) -> None:
        await self._engine.close()

    def _on_health(self, answers: bool) -> None:
        if not answers and self.bus.state == "ready":
            log.warning("the engine does not answer", extra={"engine": self.config.engine})
            self._is_down = True
            self.bus.set_state("warming")
        elif answers and self._is_down and self.bus.state == "warming":
            log.info("the engine answers again", extra={"engine": self.config.engine})
            self._is_down = False
            self.bus.set_state("ready")

    @operation(Generate)
    async def generate(self, call: Call, request: Generate) -> None:
        """Stream the tokens of one request until it ends."""
        self.check_served(request.model)
        check_request(request, self._engine.features, self.config.engine)
        if request.sampling.max_tokens <= len(request.output):
            call.finish("length", Usage(len(request.prompt)))
            return
        with Measured(self._pace, call.id, len(request.prompt), request.priority) as measured:
            outputs = self._engine.generate(call.id, request, call.expires)
            async with aclosing(outputs):
                async for output in outputs:
                    await self._send(call, request, output, measured)
                    if output.finish:
                        return
        raise Unavailable(f"{self.config.engine} ended a reply without a reason; it is tried again")

    async def _send(
        self, call: Call, request: Generate, output: StepOutput, measured: Measured
    ) -> None:
        if output.ids:
            measured.note(len(output.ids), output.cached_tokens)
            waited = time.monotonic()
            await call.send(Tokens(output.ids, output.logprobs))
            if time.monotonic() - waited > 0.001:
                measured.restart_clock()
        if output.finish:
            usage = Usage(len(request.prompt), cached_tokens=max(output.cached_tokens, 0))
            call.finish(output.finish, usage, measured.timing())

    def models(self) -> list[ModelCard]:
        return self._cards

    def load(self) -> dict[str, float]:
        """Return what was measured here; what the engine reports itself takes precedence."""
        return self._pace.load() | self._engine.load()

    def stats(self) -> dict[str, Any]:
        return self._pace.load() | self._engine.describe()

    def check_integrity(self) -> None:
        super().check_integrity()
        self._pace.check_integrity()
